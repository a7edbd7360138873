"""RoPE as it was published."""

from jaxtyping import Float
from torch import Tensor

from wakeful.ropes.base import RopeScaling


class Plain(RopeScaling):
    """The frequencies θ^{−2i/d} as they are."""

    examples = ("plain",)
    neutral = "plain"

    def scaled(self, frequencies: Float[Tensor, "half"]) -> Float[Tensor, "half"]:
        return frequencies
