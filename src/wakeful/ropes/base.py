"""How RoPE's frequencies are changed so that a model reads further than it was trained to."""

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from wakeful.variants import Variant


class RopeScaling(Variant, ABC):
    """A map of RoPE's frequencies, in radians a token, that holds for every length of text."""

    @abstractmethod
    def scaled(self, frequencies: Float[Tensor, "half"]) -> Float[Tensor, "half"]:
        """Return the frequencies to use in place of θ^{−2i/d}."""
