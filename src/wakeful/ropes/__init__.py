"""RoPE scalings: changes of the frequencies for texts longer than those of training."""

import math
from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.variants import Variant

__all__ = ["Linear", "Llama3", "Plain", "RopeScaling"]


class RopeScaling(Variant, ABC):
    """A map of RoPE's frequencies, in radians per token, for texts of every length."""

    @abstractmethod
    def scaled(self, frequencies: Float[Tensor, "half"]) -> Float[Tensor, "half"]:
        """Return the frequencies that replace θ^{−2i/d}."""


class Plain(RopeScaling):
    """The unchanged frequencies θ^{−2i/d}."""

    examples = ("plain",)
    neutral = "plain"

    def scaled(self, frequencies: Float[Tensor, "half"]) -> Float[Tensor, "half"]:
        return frequencies


class Linear(RopeScaling):
    """All frequencies divided by `factor`: position interpolation (Chen et al. 2023)."""

    examples = ("linear(factor=2.0)",)
    neutral = "linear(factor=1.0)"

    def __init__(self, *, factor: float) -> None:
        if not factor > 0:
            raise WakefulError(f"linear: factor must be positive, got {factor}")
        self.factor = factor

    def scaled(self, frequencies: Float[Tensor, "half"]) -> Float[Tensor, "half"]:
        return frequencies / self.factor


class Llama3(RopeScaling):
    """Slow frequencies divided by `factor`, fast ones kept, linear interpolation in between.

    A frequency f turns r = f · original_length / 2π times in the context of the first training;
    with s = (r − low) / (high − low), cut to [0, 1], it becomes f · (s + (1 − s) / factor).
    """

    examples = ("llama3(factor=8.0, original_length=8192)",)
    neutral = "llama3(factor=1.0, original_length=8192)"

    def __init__(
        self, *, factor: float, original_length: int, low: float = 1.0, high: float = 4.0
    ) -> None:
        if not factor > 0 or original_length < 1 or not high > low:
            raise WakefulError(
                "llama3: factor and original_length must be positive and high above low, got "
                f"{factor}, {original_length}, {high} and {low}"
            )
        self.factor = factor
        self.original_length = original_length
        self.low = low
        self.high = high

    def scaled(self, frequencies: Float[Tensor, "half"]) -> Float[Tensor, "half"]:
        r = frequencies * (self.original_length / (2 * math.pi))
        s = ((r - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return frequencies * (s + (1 - s) / self.factor)
