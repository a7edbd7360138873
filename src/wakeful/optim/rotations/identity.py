"""No rotation: OrthoAdam with it is AdamW, step for step."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.optim.rotations.base import Rotation


class Identity(Rotation):
    """Q = I. Both directions return the tensor they are given."""

    def __init__(
        self,
        width: int,
        *,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        del width, generator, device, dtype

    def into(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return grad

    def back(self, step: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return step

    @staticmethod
    def memory(width: int, itemsize: int, options: Mapping[str, int | float]) -> int:
        return 0
