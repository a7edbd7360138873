"""Peak memory of softmax-1 against plain SDPA, forward and backward, each in its own process."""

import resource
import subprocess
import sys
from collections.abc import Iterator

import torch

from benchmarks.timing import Ratio
from wakeful.model.attend import attend

SHAPE = (4, 4096, 12, 64)
"""Long enough that one L × L float32 matrix of all heads would take 3 GB."""


def ratios() -> Iterator[Ratio]:
    """Yield the ratio of the growths of resident memory (its "seconds" are MB)."""
    ours, theirs = (
        int(subprocess.check_output([sys.executable, "-m", "benchmarks.memory", form])) / 1024
        for form in ("softmax1", "plain")
    )
    ratio = ours / theirs
    yield Ratio(
        f"softmax-1, L={SHAPE[1]}, peak memory (MB)", "plain SDPA", ratio, ratio, ratio, ours,
        theirs, "<= 1.10",
    )  # fmt: skip


def _peak(form: str) -> int:
    # A first call loads libraries; the second one's growth is the attention's own.
    _both_ways((1, 16, 12, 64), form)
    return _both_ways(SHAPE, form)


def _both_ways(shape: tuple[int, ...], form: str) -> int:
    """Run forward and backward; return how much the largest resident size grew, in kB."""
    torch.manual_seed(0)
    heads = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sink = torch.zeros(shape[2]) if form == "softmax1" else None
    torch.autograd.grad(attend(*heads, scale=0.125, sink=sink), heads, grad)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


if __name__ == "__main__":
    print(_peak(sys.argv[1]))
