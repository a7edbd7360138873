"""A uniformly random rotation, the paper's: one dense n × n matrix a weight."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.optim.rotations.base import Rotation, haar_matrix


class Haar(Rotation):
    """Q from the Haar measure on O(n), by QR with the sign fix; O(n²) a row.

    The matrix comes from LAPACK in float64: the same seed gives the same bits on one machine and
    the same values to about 1e-15 on another whose LAPACK orders its sums differently.
    """

    def __init__(
        self,
        width: int,
        *,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.matrix = haar_matrix(width, generator).to(device, dtype)

    def into(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return grad @ self.matrix.mT

    def back(self, step: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return step @ self.matrix

    @staticmethod
    def memory(width: int, itemsize: int, options: Mapping[str, int | float]) -> int:
        return width * width * itemsize

    @staticmethod
    def making_memory(width: int, itemsize: int) -> int:
        return 4 * width * width * 8
