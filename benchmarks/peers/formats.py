"""The number formats of the table, in words that every tool can be asked for.

All linear layers but the head are quantized; scales of weights are symmetric.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Format:
    """Bits of weights, inputs and cache (0: full precision), and how far one scale reaches."""

    says: str
    weights: int = 0
    inputs: int = 0
    per: Literal["token", "tensor"] = "token"
    """Of inputs: one scale a token, found as it comes, or one a tensor, calibrated; NVFP4 has one
    above those of its blocks."""
    grouped: bool = False
    """Whether weights have a scale a group of inputs, rather than one an output channel."""
    cache: int = 0
    block: str = ""
    """A format of blocks, for weights and inputs alike."""
    bits: float = 0.0
    """Mean bits per weight, scales included, where each layer has a format of its own."""


FORMATS = {
    "w8a8-tensor": Format("8 bits, inputs per tensor", weights=8, inputs=8, per="tensor"),
    "w8a8-token": Format("8 bits, inputs per token", weights=8, inputs=8),
    "w4a16": Format("4-bit weights in groups", weights=4, grouped=True),
    "w4a8": Format("4-bit weights in groups, 8-bit inputs", weights=4, grouped=True, inputs=8),
    "w4a4": Format("4-bit weights in groups, 4-bit inputs", weights=4, grouped=True, inputs=4),
    "kv4": Format("4-bit keys and values", cache=4),
    "nvfp4": Format("NVFP4 weights and inputs", block="nvfp4", per="tensor"),
    "mxfp4": Format("MXFP4 weights and inputs", block="mxfp4"),
    "mixed": Format("weights of 4.5 bits on average, a format for each layer", bits=4.5),
}


def group_of(widths: set[int]) -> int:
    """Return the largest usual group that divides the inputs of every layer."""
    return next(size for size in (128, 64, 32, 16) if not any(width % size for width in widths))
