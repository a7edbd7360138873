"""Peak memory of softmax-1 against plain SDPA, forward and backward, each in its own process."""

import subprocess
import sys
from collections.abc import Iterator

import torch

from benchmarks.resident import forget_peak, resident
from benchmarks.timing import Ratio
from wakeful.model.attend import attend

SHAPE = (4, 4096, 12, 64)
"""Long enough that one L × L float32 matrix of all heads would take 3 GB."""


def ratios() -> Iterator[Ratio]:
    """Yield the ratio of the growths of resident memory (its "seconds" are MB)."""
    ours, theirs = (
        float(subprocess.check_output([sys.executable, "-m", "benchmarks.memory", form]))
        for form in ("softmax1", "plain")
    )
    ratio = ours / theirs
    yield Ratio(
        f"softmax-1, L={SHAPE[1]}, peak memory (MB)", "plain SDPA", ratio, ratio, ratio, ours,
        theirs, "<= 1.10",
    )  # fmt: skip


def _peak(form: str) -> float:
    # A first call loads libraries; the second one's growth is the attention's own.
    _both_ways((1, 16, 12, 64), form)
    return _both_ways(SHAPE, form)


def _both_ways(shape: tuple[int, ...], form: str) -> float:
    """Run forward and backward; return how much the largest resident size grew, in MB."""
    torch.manual_seed(0)
    heads = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape)
    forget_peak()
    before = resident()
    sink = torch.zeros(shape[2]) if form == "softmax1" else None
    torch.autograd.grad(attend(*heads, scale=0.125, sink=sink), heads, grad)
    return resident("VmHWM") - before


if __name__ == "__main__":
    print(_peak(sys.argv[1]))
