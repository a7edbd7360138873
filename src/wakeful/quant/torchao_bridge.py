"""torchao's kernels on our integers; importing this file needs torchao.

torchao's own symmetric int8 spans −128 to 127, so its quantization is not From Attention to
Activation's: the numbers and scales are ours, and only the arithmetic is torchao's.
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor
from torchao.kernel.intmm import int_scaled_matmul  # pyright: ignore[reportMissingImports]
from torchao.quantization import (  # pyright: ignore[reportMissingImports]
    IntxUnpackedToInt8Tensor,
)

from wakeful.quant.grids import Scales
from wakeful.quant.schemes import Rule


def scaled_matmul(
    a: Int8[Tensor, "M K"], b: Int8[Tensor, "N K"], rows: Float[Tensor, "S 1"]
) -> Float[Tensor, "M N"]:
    """Return (a bᵀ) · rows; torchao picks signed or unsigned instructions by the processor."""
    return int_scaled_matmul(a, b.T, rows)


def weight_only(
    integers: Int8[Tensor, "N K"], rule: Rule, scales: Scales, dtype: torch.dtype
) -> Tensor:
    """Return the weights as a torchao tensor, which `F.linear` takes."""
    channels, width = integers.shape
    shared = rule.per == "tensor"
    zero = scales.zero
    return IntxUnpackedToInt8Tensor(
        qdata=integers,
        scale=scales.scale,
        zero_point=torch.zeros_like(scales.scale) if zero is None else zero.float(),
        target_dtype=getattr(torch, f"int{rule.grid.bits}"),
        block_size=(channels if shared else 1, width),
        dtype=dtype,
        activation_quantization=None,
    )
