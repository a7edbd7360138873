"""Norms before the sublayers and after them."""

from wakeful.placements.base import NormOrder, Placement


class Peri(Placement):
    """x + Norm(F(Norm x)): Peri-LN (Kim et al. 2025, arXiv 2502.02732), Gemma 2's."""

    examples = ("peri",)

    def at(self, layer: int, num_layers: int) -> NormOrder:
        return "both"
