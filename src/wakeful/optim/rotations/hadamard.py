"""Random signs, then a fast Walsh–Hadamard transform: near Haar's cure at O(n log n) a row.

Any width will do: with n = 2ᵏ m and m odd the transform is F = H_{2ᵏ} ⊗ C_m, where C_m is the
discrete Hartley transform, C_ij = (cos(2πij/m) + sin(2πij/m)) / √m. C_m is symmetric and orthogonal
for every m, and has no zero entry for odd m (a zero needs ij/m = 3/8 modulo 1/2), so F is exactly
orthogonal on Rⁿ, mixes every coordinate with every other in one pass, and F F = I. Padding would
leave Rⁿ, and diagonal blocks would keep coordinates apart. With m = 1 F is Walsh–Hadamard.

F is applied as a few small matrix products, one for each Kronecker factor: on a CPU a factor of
16 costs 0.4 ns an element and one of 32 0.8 ns, a dense 512 × 512 product 9 ns.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.optim.rotations.base import Rotation
from wakeful.parts.orthoadam import random_signs, transform, transform_factors


class Hadamard(Rotation):
    """Q = F S: random signs S, then F, Walsh–Hadamard (⊗ Hartley where n has an odd factor).

    Holds n signs a weight; the factors of F are shared by all weights of that width.
    """

    examples = ("hadamard",)

    def draw(
        self, width: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Draw the signs S; the factors of F are the same for every weight of this width."""
        self.signs = random_signs(width, generator).to(device, dtype)
        self.factors = transform_factors(width, device, dtype)

    def into(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return transform(grad * self.signs, self.factors)

    def back(self, step: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return transform(step, self.factors).mul_(self.signs)
