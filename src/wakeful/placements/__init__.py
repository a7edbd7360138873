"""Placements of a block's norms."""

import math
from abc import ABC, abstractmethod
from typing import Literal

from wakeful.errors import WakefulError
from wakeful.variants import Variant

__all__ = ["Mixed", "NormOrder", "Peri", "Placement", "Post", "Pre", "Reordered"]

NormOrder = Literal["before", "over", "both", "after"]
"""x + F(Norm x), Norm(x + F x), x + Norm(F(Norm x)), or x + Norm(F x), F the attention or the
feed-forward network."""


class Placement(Variant, ABC):
    """The positions of each layer's norms; a final norm before the head is always there."""

    @abstractmethod
    def at(self, layer: int, num_layers: int) -> NormOrder:
        """Return the positions of the norms of a layer (from 0)."""


class Pre(Placement):
    """x + F(Norm x): the pre-norm Transformer."""

    examples = ("pre",)
    neutral = "pre"

    def at(self, layer: int, num_layers: int) -> NormOrder:
        return "before"


class Mixed(Placement):
    """Post-norm in the first ⌊share · N⌋ layers, pre-norm after: Mix-LN (Li et al. 2024).

    arXiv 2412.13795, whose share is a quarter.
    """

    examples = ("mixed", "mixed(share=0.5)")
    neutral = "mixed(share=0.0)"

    def __init__(self, *, share: float = 0.25) -> None:
        if not 0 <= share <= 1:
            raise WakefulError(f"mixed: share must be between 0 and 1, got {share}")
        self.share = share

    def at(self, layer: int, num_layers: int) -> NormOrder:
        # 1e-9: a product such as 0.29 · 100 comes out just below the integer.
        return "over" if layer < math.floor(self.share * num_layers + 1e-9) else "before"


class Peri(Placement):
    """x + Norm(F(Norm x)): Peri-LN (Kim et al. 2025, arXiv 2502.02732), Gemma 2's."""

    examples = ("peri",)

    def at(self, layer: int, num_layers: int) -> NormOrder:
        return "both"


class Post(Placement):
    """Norm(x + F x): the first Transformer's, and BERT's."""

    examples = ("post",)

    def at(self, layer: int, num_layers: int) -> NormOrder:
        return "over"


class Reordered(Placement):
    """x + Norm(F x): OLMo 2's reordered norm (Team OLMo 2024, arXiv 2501.00656, eqs. 1 and 2)."""

    examples = ("reordered",)

    def at(self, layer: int, num_layers: int) -> NormOrder:
        return "after"
