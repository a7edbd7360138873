"""Where a token stands: rotary position embedding.

Learned positions are an `nn.Embedding` of the decoder, added to the token embedding.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PositionName = Literal["rotary", "learned", "none"]
Rotation = tuple[Float[Tensor, "*B L 1 half"], Float[Tensor, "*B L 1 half"]]
"""Cosines and sines of each new token's angles, one for each pair of channels."""


class Rotary(nn.Module):
    """RoPE (Su et al. 2024): channel pairs (i, i + d/2) turn by position · θ^{−2i/d}.

    The pairing is Llama's in Transformers, so its weights load as they are.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, max_length: int, *, theta: float) -> None:
        super().__init__()
        half = torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
        angles = torch.outer(torch.arange(max_length, dtype=torch.float64), theta**-half)
        self.register_buffer("cos", angles.cos().float().unsqueeze(1), persistent=False)
        self.register_buffer("sin", angles.sin().float().unsqueeze(1), persistent=False)

    def forward(self, positions: Int[Tensor, "*B L"] | slice) -> Rotation:
        return self.cos[positions], self.sin[positions]


def rotate(heads: Float[Tensor, "B L N d"], rotation: Rotation) -> Float[Tensor, "B L N d"]:
    """Turn each head's channel pairs by its token's angles."""
    cos, sin = (part.to(heads.dtype) for part in rotation)
    return _Rotate.apply(heads, cos, sin)


class _Rotate(torch.autograd.Function):
    """The turn, and the turn back for its gradient, without the copies that slicing would keep."""

    @staticmethod
    def forward(ctx, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(cos, sin)
        return _turned(heads, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1.0), None, None


def _turned(heads: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat(
        [
            torch.addcmul(first * cos, second, sin, value=-direction),
            torch.addcmul(second * cos, first, sin, value=direction),
        ],
        dim=-1,
    )
