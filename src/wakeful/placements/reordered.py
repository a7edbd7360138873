"""Norms after the sublayers, inside the residual stream's branches."""

from wakeful.placements.base import NormOrder, Placement


class Reordered(Placement):
    """x + Norm(F x): OLMo 2's reordered norm (Team OLMo 2024, arXiv 2501.00656, eqs. 1 and 2)."""

    examples = ("reordered",)

    def at(self, layer: int, num_layers: int) -> NormOrder:
        return "after"
