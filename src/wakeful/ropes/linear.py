"""Position interpolation."""

from jaxtyping import Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.ropes.base import RopeScaling


class Linear(RopeScaling):
    """Every frequency divided by `factor`: positions stand closer together (Chen et al. 2023)."""

    examples = ("linear(factor=2.0)",)
    neutral = "linear(factor=1.0)"

    def __init__(self, *, factor: float) -> None:
        if not factor > 0:
            raise WakefulError(f"linear: factor must be positive, got {factor}")
        self.factor = factor

    def scaled(self, frequencies: Float[Tensor, "half"]) -> Float[Tensor, "half"]:
        return frequencies / self.factor
