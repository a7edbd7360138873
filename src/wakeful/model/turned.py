"""Rotations of channels in the forward pass, where no matrix can absorb them."""

from torch import Tensor, nn

from wakeful.parts.orthoadam import transform, transform_factors


class WalshHadamard(nn.Module):
    """x F on the last axis, F the Walsh–Hadamard transform (⊗ Hartley) of
    `wakeful.parts.orthoadam`; F is symmetric and F F = I.

    Applied to a feed-forward network's hidden channels, with W_down F instead of W_down, it keeps
    the function, and `down` reads no outlier channels. Applied to queries and keys after RoPE,
    (F q)ᵀ (F k) = qᵀ k, and cached keys have no outlier channels (QuaRot, 2404.00456, section 4;
    SpinQuant, 2405.16406, calls it R3).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x F, for `x` of any shape (…, width)."""
        return walsh_hadamard(x)


def walsh_hadamard(x: Tensor) -> Tensor:
    """Return x F, for `x` of any shape (…, width); see `WalshHadamard`."""
    width = x.shape[-1]
    factors = transform_factors(width, x.device, x.dtype)
    return transform(x.reshape(-1, width), factors).view(x.shape)
