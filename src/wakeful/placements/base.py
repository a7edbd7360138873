"""What a placement owes: where a block's norms stand."""

from abc import ABC, abstractmethod
from typing import Literal

from wakeful.variants import Variant

NormOrder = Literal["before", "over", "both", "after"]
"""x + F(Norm x), Norm(x + F x), x + Norm(F(Norm x)), or x + Norm(F x), F the attention or the
feed-forward network."""


class Placement(Variant, ABC):
    """Which norms each layer has; whichever it is, a final norm stands before the head."""

    @abstractmethod
    def at(self, layer: int, num_layers: int) -> NormOrder:
        """Return where the norms of a layer (from 0) stand."""


class Pre(Placement):
    """x + F(Norm x): the pre-norm Transformer."""

    examples = ("pre",)
    neutral = "pre"

    def at(self, layer: int, num_layers: int) -> NormOrder:
        return "before"
