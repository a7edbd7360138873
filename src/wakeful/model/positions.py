"""Rotary position embedding.

Learned positions are an `nn.Embedding` of the decoder, added to the token embedding.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.ropes import RopeScaling
from wakeful.tracing import is_differentiated_again, is_transformed

CosSin = tuple[Float[Tensor, "*B L 1 half"], Float[Tensor, "*B L 1 half"]]
"""Cosines and sines of each new token's angles, one for each pair of channels."""


class Rotary(nn.Module):
    """RoPE (Su et al. 2024): channel pairs (i, i + r/2) are rotated by position · θ^{−2i/r}.

    The first r = `rotary_width` channels of a head are rotated. The pairs are those of Llama in
    Transformers, so its weights load unchanged.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        rotary_width: int,
        max_length: int,
        *,
        theta: float,
        scaling: RopeScaling | None = None,
    ) -> None:
        """Compute the cosines and sines for positions below `max_length`, which are not saved."""
        super().__init__()
        self.rotary_width, self.max_length = rotary_width, max_length
        self.theta, self.scaling = theta, scaling
        cos, sin = self.table()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def table(self) -> CosSin:
        """Return the cosines and sines of the angles at every position, each (`max_length`, 1,
        `rotary_width` / 2), computed in float64 and rounded once to float32.
        """
        # On the CPU even if the default device is "meta", on which models are built.
        options = {"dtype": torch.float64, "device": "cpu"}
        exponents = torch.arange(0, self.rotary_width, 2, **options) / self.rotary_width
        frequencies = self.theta**-exponents
        if self.scaling is not None:
            frequencies = self.scaling.scaled(frequencies)
        angles = torch.outer(torch.arange(self.max_length, **options), frequencies)
        return angles.cos().float().unsqueeze(1), angles.sin().float().unsqueeze(1)

    def forward(self, positions: Int[Tensor, "*B L"] | slice) -> CosSin:
        return self.cos[positions], self.sin[positions]


def turn_pairs(heads: Float[Tensor, "B L N d"], rotation: CosSin) -> Float[Tensor, "B L N d"]:
    """Return heads with their channel pairs rotated by each token's angles.

    `rotation` has the angles' cosines and sines, one for each pair. Channels beyond these pairs
    stay.
    """
    cos, sin = rotation
    if cos.dtype != heads.dtype:
        cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    # `_Rotate` saves memory in training; `torch.func` cannot transform it.
    if torch.is_grad_enabled() and not is_transformed():
        return _Rotate.apply(heads, cos, sin)
    return _rotate_halves(heads, cos, sin, 1.0)


class _Rotate(torch.autograd.Function):
    """The rotation, and the inverse one for its gradient, without the copies that slicing keeps."""

    @staticmethod
    def forward(ctx, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(heads, cos, sin, 1.0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient by the heads, which is `grad` rotated back; the angles have none."""
        cos, sin = ctx.saved_tensors
        if is_differentiated_again():  # by `_Rotate`, which has a gradient in turn
            return _Rotate.apply(grad, cos, -sin), None, None
        return _rotate_halves(grad, cos, sin, -1.0), None, None


def _rotate_halves(heads: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    """Return heads with channel pairs (i, i + half) rotated by their angles: forward if `direction`
    is 1.0, back if it is −1.0.
    """
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    parts = [
        torch.addcmul(first * cos, second, sin, value=-direction),
        torch.addcmul(second * cos, first, sin, value=direction),
    ]
    if 2 * half < heads.shape[-1]:  # channels that are not rotated
        parts.append(heads[..., 2 * half :])
    return torch.cat(parts, dim=-1)
