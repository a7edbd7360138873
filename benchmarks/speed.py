"""Training speed on one GPU, in bfloat16 and compiled: tokens a second, and the share of its peak.

Nothing is timed where torch sees no GPU. Bars are public figures of one H100.
"""

from collections.abc import Iterator

import torch

from benchmarks.gpu import peak_flops, step_flops
from benchmarks.models import GPT2, Ours, Shape, random_tokens, training_step
from benchmarks.timing import Ratio, seconds

SHAPES = {
    "124M": (Shape(12, 12, 768, 3072, 50_304, 1024), 64, ">= 0.38, 446,000 tokens/s"),
    "350M": (Shape(24, 16, 1024, 4096, 50_304, 1024), 32, ">= 0.45"),
    "1B": (Shape(20, 16, 2048, 8192, 50_304, 2048), 8, ">= 0.50"),
}
"""The GPT-2 of each size, the sequences of a step, and the bar."""
STEPS = 20
WARMUP = 5


def ratios() -> Iterator[Ratio]:
    """Yield each size's share of this machine's GPU's peak; none where there is no GPU."""
    if not torch.cuda.is_available():
        return
    torch.set_float32_matmul_precision("high")
    for name, (shape, batch, target) in SHAPES.items():
        yield share(name, shape, batch, target, torch.device("cuda"))
        torch.cuda.empty_cache()


def share(name: str, shape: Shape, batch: int, target: str, device: torch.device) -> Ratio:
    """Return the arithmetic of a step at the device's peak over the time of one.

    A batch that does not fit into memory is halved until it does.
    """
    while True:
        try:
            return _share(name, shape, batch, target, device)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        batch //= 2
        torch.cuda.empty_cache()


def _share(name: str, shape: Shape, batch: int, target: str, device: torch.device) -> Ratio:
    tokens = random_tokens(shape, batch, shape.max_length, device)
    model = Ours(shape, **GPT2)
    step = training_step(model, tokens, bfloat16=True, compiled=True)
    for _ in range(WARMUP):
        step()
    times = sorted(seconds(step) for _ in range(STEPS))
    ideal = step_flops(model, shape, batch) / peak_flops(device)
    median, quick, slow = times[STEPS // 2], times[STEPS // 4], times[-STEPS // 4]
    speed = f"{batch * shape.max_length / median:,.0f} tokens/s, {batch} sequences"
    return Ratio(
        f"GPT-2 of {name}: {speed}", "the peak of its arithmetic", ideal / median, ideal / slow,
        ideal / quick, ideal, median, target,
    )  # fmt: skip
