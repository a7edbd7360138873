"""`WalshHadamard`: a rotation of channels that no matrix can take up, done as the model runs."""

from torch import Tensor, nn

from wakeful.optim.rotations.hadamard import transform, transform_factors


class WalshHadamard(nn.Module):
    """x F on the last axis, F the Walsh–Hadamard transform (⊗ Hartley) of
    `wakeful.optim.rotations.hadamard`; F is symmetric and F F = I.

    Of a feed-forward network's hidden channels, with W_down F in the place of W_down, it leaves the
    function as it is, and `down` reads no channel that stands out. Of queries and keys after RoPE,
    (F q)ᵀ (F k) = qᵀ k, and no channel of a cached key stands out (QuaRot, 2404.00456, section 4;
    SpinQuant, 2405.16406, calls it R3).
    """

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        factors = transform_factors(width, x.device, x.dtype)
        return transform(x.reshape(-1, width), factors).view(x.shape)
