"""A signed permutation: the rotation that is none, kept because it must change nothing."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.optim.rotations.base import Rotation, random_signs


class SignedPermutation(Rotation):
    """Q = S P, a permutation of the coordinates with random signs.

    Adam is equivariant to signed permutations, so OrthoAdam with this one equals Adam to rounding:
    a known answer for tests. It cures nothing.
    """

    def __init__(
        self,
        width: int,
        *,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        order = torch.randperm(width, generator=generator)
        self.order = order.to(device)
        self.inverse = order.argsort().to(device)
        self.signs = random_signs(width, generator).to(device, dtype)

    def into(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return grad.index_select(-1, self.order).mul_(self.signs)

    def back(self, step: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return (step * self.signs).index_select(-1, self.inverse)

    @staticmethod
    def memory(width: int, itemsize: int, options: Mapping[str, int | float]) -> int:
        return width * (itemsize + 16)
