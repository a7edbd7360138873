"""Layers that share projections: one set of values, keys and values (CLA), keys or queries."""

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
        super().__init__()
        if not anchors or anchors[0] != 0 or list(anchors) != sorted(set(anchors)):
            raise WakefulError(
                f"svformer: anchors must be ascending layer numbers starting at 0, got {anchors!r}"
            )
        self.anchors = tuple(anchors)

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        """Bind the route to layers; raise `WakefulError` if an anchor is past the last."""
        if self.anchors[-1] >= shape.num_layers:
            raise WakefulError(
                f"svformer: anchor {self.anchors[-1]} is past the last layer {shape.num_layers - 1}"
            )
        super().attach(shape, layers)

    def source(self, layer: int) -> Source:
        anchor = self.anchors[bisect_right(self.anchors, layer) - 1]
        return Source(query=layer, key=layer, value=anchor)


class _Sharing(ValueRoute):
    """Each `group` of consecutive layers uses its first layer's `shared` projections; 0: all do."""

    shared: tuple[str, ...]

    def __init__(self, *, group: int = 0) -> None:
        super().__init__()
        if group < 0:
            raise WakefulError(f"{self.name}: group must not be negative, got {group}")
        self.group = group

    def source(self, layer: int) -> Source:
        leader = layer - layer % self.group if self.group else 0
        return Source(layer, layer, layer)._replace(**dict.fromkeys(self.shared, leader))


class CLA(_Sharing):
    """Each `group` of consecutive layers shares its first layer's keys and values.

    The KV-efficient baseline of Value Residual Learning (figs. 4, 13), after Brandon et al. 2024.
    """

    name = "cla"
    examples = ("cla", "cla(group=3)")
    neutral = "cla(group=1)"
    shared = ("key", "value")

    def __init__(self, *, group: int = 2) -> None:
        if group < 1:
            raise WakefulError(f"cla: group must be at least 1 layer, got {group}")
        super().__init__(group=group)


class SharedKeys(_Sharing):
    """Each `group` of consecutive layers uses its first layer's keys; `group=0`, all layers one's.

    Value Residual Learning, fig. 4 (`group=2`) and fig. 16 (all layers): worse than sharing values.
    """

    name = "shared_keys"
    examples = ("shared_keys", "shared_keys(group=2)")
    neutral = "shared_keys(group=1)"
    shared = ("key",)


class SharedQueries(_Sharing):
    """Each `group` of consecutive layers uses its first layer's queries; `group=0`, all one's.

    Value Residual Learning, fig. 4 (`group=2`) and fig. 16 (all layers): worse than sharing values.
    Queries are shared as they are projected, keys and values as they are mixed: what a route mixes
    into queries stays in its own layer.
    """

    name = "shared_queries"
    examples = ("shared_queries", "shared_queries(group=2)")
    neutral = "shared_queries(group=1)"
    shared = ("query",)
