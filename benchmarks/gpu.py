"""The field on a GPU, in bfloat16 and compiled: nothing is timed where torch sees none.

Peaks are the makers' dense bfloat16 figures. A step's arithmetic is 6 FLOP a weight that is
multiplied with and token, and 6 · layers · width · L a token for causal attention, half of what is
often counted.
"""

from collections.abc import Iterator

import torch
from torch import nn

from benchmarks import optimizer
from benchmarks.models import (
    GPT2,
    Ours,
    PlainGPT,
    Shape,
    attention_passes,
    random_tokens,
    training_step,
)
from benchmarks.timing import Ratio, compare

GPT2_SMALL = Shape(12, 12, 768, 3072, 50_304, 1024)
SHAPES = {
    "82M": Shape(8, 8, 512, 1792, 50_277, 2048),
    "180M": Shape(12, 12, 768, 2688, 50_277, 2048),
    "468M": Shape(24, 16, 1024, 3584, 50_277, 2048),
}
"""Of Value Residual Learning."""
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
VARIANTS = (
    ("ResFormer", {"route": 'resformer(mode="learnable")'}, "<= 1.03"),
    ("SVFormer", {"route": "svformer"}, "<= 1.00"),
    ("softmax-1", {"normalizer": "softmax1"}, ""),
)


def ratios() -> Iterator[Ratio]:
    """Yield every row on this machine's GPU; none where there is no GPU."""
    if not torch.cuda.is_available():
        return
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    yield from attention(device, (8, 2048, 12, 64))
    yield from attention(device, (8, 2048, 12, 64), compiled=True)
    yield from against_plain(device, GPT2_SMALL, 16)
    for name, shape in SHAPES.items():
        yield from variants(device, name, shape, 8)
    yield from optimizer.ratios(SHAPES["82M"], 16, device=device, bfloat16=True)


def attention(
    device: torch.device, shape: tuple[int, int, int, int], *, compiled: bool = False
) -> Iterator[Ratio]:
    """Yield softmax-1 over fused SDPA, forward and backward, bfloat16."""
    heads = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
    *inputs, grad = heads
    for x in inputs:
        x.requires_grad_()
    ours, plain = attention_passes(inputs, grad, compiled=compiled)
    name = f"softmax-1, {shape}{', compiled' if compiled else ''}"
    yield compare(name, ours, "fused SDPA", plain, warmup=5, target="<= 1.03")


def against_plain(device: torch.device, shape: Shape, batch: int) -> Iterator[Ratio]:
    """Yield our GPT-2 over a compiled plain loop's, then its share of the arithmetic's peak."""
    tokens = random_tokens(shape, batch, shape.max_length, device)
    model = Ours(shape, **GPT2)
    ours = training_step(model, tokens, bfloat16=True, compiled=True)
    theirs = training_step(PlainGPT(shape), tokens, bfloat16=True, compiled=True)
    row = compare(
        f"GPT-2 of {_millions(model)}", ours, "a compiled plain loop", theirs,
        warmup=5, target="<= 1.00",
    )  # fmt: skip
    yield row
    yield from _share(f"GPT-2 of {_millions(model)}", model, shape, batch, row.seconds, device)


def variants(device: torch.device, name: str, shape: Shape, batch: int) -> Iterator[Ratio]:
    """Yield each variant over our vanilla, compiled, then shares of the arithmetic's peak."""
    tokens = random_tokens(shape, batch, shape.max_length, device)
    model = Ours(shape)
    vanilla = training_step(model, tokens, bfloat16=True, compiled=True)
    seconds = 0.0
    for what, options, target in VARIANTS:
        step = training_step(Ours(shape, **options), tokens, bfloat16=True, compiled=True)
        row = compare(f"{what}, {name}", step, "our vanilla", vanilla, warmup=5, target=target)
        seconds = row.peer_seconds
        yield row
    yield from _share(f"vanilla, {name}", model, shape, batch, seconds, device)


def _share(
    what: str, model: nn.Module, shape: Shape, batch: int, seconds: float, device: torch.device
) -> Iterator[Ratio]:
    """Yield the arithmetic at the device's peak over a step's time: model FLOP utilization."""
    speed = f"{batch * shape.max_length / seconds:,.0f} tokens/s"
    if device.type == "cuda":
        speed += f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        torch.cuda.reset_peak_memory_stats()
    ideal = step_flops(model, shape, batch) / peak_flops(device)
    share = ideal / seconds
    yield Ratio(
        f"{what}: {speed}", "the peak of its arithmetic", share, share, share, ideal, seconds,
        ">= 0.40",
    )  # fmt: skip


def step_flops(model: nn.Module, shape: Shape, batch: int) -> float:
    """Arithmetic of one step's forward and backward passes."""
    tied = isinstance(model, Ours) and model.decoder.config.tied
    looked_up = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if "positions" in name or ("embed" in name and not tied)
    )
    weights = sum(parameter.numel() for parameter in model.parameters()) - looked_up
    attention = shape.num_layers * shape.width * shape.max_length
    return 6.0 * batch * shape.max_length * (weights + attention)


def peak_flops(device: torch.device) -> float:
    """Return the device's dense bfloat16 peak; NaN, and so no share, where it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), float("nan"))


def _millions(model: nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f}M"
