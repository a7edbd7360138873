"""Layers that share projections: one set of values, or of keys and values (CLA)."""

from bisect import bisect_right
from collections.abc import Iterable

from wakeful.errors import WakefulError
from wakeful.routes.base import Source, ValueRoute
from wakeful.variants.shape import Shape


class SVFormer(ValueRoute):
    """U_n = A_n V_1: later layers have no value projection (Value Residual Learning, eq. 10).

    With several `anchors` (layers from 0, the first one 0) each layer uses the values of the
    nearest anchor at or before it (fig. 17). Values are cached once an anchor, so one anchor's
    cache is exactly (N+1)/2N of the vanilla Transformer's.
    """

    examples = ("svformer", "svformer(anchors=[0, 2])")

    def __init__(self, *, anchors: "list[int] | tuple[int, ...]" = (0,)) -> None:
        """Store the anchors: the layers whose values those after them use too.

        Raises:
            WakefulError: the anchors do not ascend, or the first is not 0.
        """
        super().__init__()
        if not anchors or anchors[0] != 0 or list(anchors) != sorted(set(anchors)):
            raise WakefulError(
                f"svformer: anchors must be ascending layer numbers starting at 0, got {anchors!r}"
            )
        self.anchors = tuple(anchors)

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        """Bind the route to `layers`; raise `WakefulError` if an anchor is past the last layer."""
        if self.anchors[-1] >= shape.num_layers:
            raise WakefulError(
                f"svformer: anchor {self.anchors[-1]} is past the last layer {shape.num_layers - 1}"
            )
        super().attach(shape, layers)

    def source(self, layer: int) -> Source:
        """Return the layer itself for queries and keys, and for values the nearest anchor at or
        before it.
        """
        anchor = self.anchors[bisect_right(self.anchors, layer) - 1]
        return Source(query=layer, key=layer, value=anchor)


class CLA(ValueRoute):
    """Each `group` of consecutive layers shares its first layer's keys and values.

    The KV-efficient baseline of Value Residual Learning (figs. 4, 13), after Brandon et al. 2024.
    """

    name = "cla"
    examples = ("cla", "cla(group=3)")
    neutral = "cla(group=1)"

    def __init__(self, *, group: int = 2) -> None:
        super().__init__()
        if group < 1:
            raise WakefulError(f"cla: group must be at least 1 layer, got {group}")
        self.group = group

    def source(self, layer: int) -> Source:
        leader = layer - layer % self.group
        return Source(query=layer, key=leader, value=leader)
