"""Post-norm in the first layers and pre-norm in the others."""

import math

from wakeful.errors import WakefulError
from wakeful.placements.base import NormOrder, Placement


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
        return "over" if layer < math.floor(self.share * num_layers + 1e-9) else "before"
