"""Norms over the sums of the residual stream and the sublayers."""

from wakeful.placements.base import NormOrder, Placement


class Post(Placement):
    """Norm(x + F x): the first Transformer's, and BERT's."""

    examples = ("post",)

    def at(self, layer: int, num_layers: int) -> NormOrder:
        return "over"
