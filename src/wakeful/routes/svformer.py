"""SVFormer: one set of values for the whole depth."""

from bisect import bisect_right
from collections.abc import Iterable

from wakeful.errors import WakefulError
from wakeful.routes.base import Source, ValueRoute
from wakeful.shape import Shape


class SVFormer(ValueRoute):
    """U_n = A_n V_1: later layers have no value projection (Value Residual Learning, eq. 10).

    With several `anchors` (layers from 0, the first one 0) each layer uses the values of the
    nearest anchor at or before it (fig. 17). Values are cached once an anchor, so one anchor's
    cache is exactly (N+1)/2N of the vanilla Transformer's.
    """

    examples = ("svformer", "svformer(anchors=[0, 2])")

    def __init__(self, *, anchors: "list[int] | tuple[int, ...]" = (0,)) -> None:
        super().__init__()
        if (
            not anchors
            or any(type(anchor) is not int for anchor in anchors)
            or anchors[0] != 0
            or list(anchors) != sorted(set(anchors))
        ):
            raise WakefulError(
                f"svformer: anchors must be ascending layer numbers starting at 0, got {anchors!r}"
            )
        self.anchors = tuple(anchors)

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        if self.anchors[-1] >= shape.num_layers:
            raise WakefulError(
                f"svformer: anchor {self.anchors[-1]} is past the last layer {shape.num_layers - 1}"
            )
        super().attach(shape, layers)

    def source(self, layer: int) -> Source:
        anchor = self.anchors[bisect_right(self.anchors, layer) - 1]
        return Source(query=layer, key=layer, value=anchor)
