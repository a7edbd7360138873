"""Layers that share projections: keys and values (CLA), keys alone, queries alone."""

from wakeful.errors import WakefulError
from wakeful.routes.base import Source, ValueRoute


def _leader(layer: int, group: int) -> int:
    """Return the first of the `group` consecutive layers that this one is among; 0: of all."""
    return layer - layer % group if group else 0


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
        leader = _leader(layer, self.group)
        return Source(query=layer, key=leader, value=leader)


class SharedKeys(ValueRoute):
    """Each `group` of consecutive layers uses its first layer's keys; `group=0`, all layers one's.

    Value Residual Learning, fig. 4 (`group=2`) and fig. 16 (all layers): worse than sharing values.
    """

    name = "shared_keys"
    examples = ("shared_keys", "shared_keys(group=2)")
    neutral = "shared_keys(group=1)"

    def __init__(self, *, group: int = 0) -> None:
        super().__init__()
        if group < 0:
            raise WakefulError(f"shared_keys: group must not be negative, got {group}")
        self.group = group

    def source(self, layer: int) -> Source:
        return Source(query=layer, key=_leader(layer, self.group), value=layer)


class SharedQueries(ValueRoute):
    """Each `group` of consecutive layers uses its first layer's queries; `group=0`, all one's.

    Value Residual Learning, fig. 4 (`group=2`) and fig. 16 (all layers): worse than sharing values.
    """

    name = "shared_queries"
    examples = ("shared_queries", "shared_queries(group=2)")
    neutral = "shared_queries(group=1)"

    def __init__(self, *, group: int = 0) -> None:
        super().__init__()
        if group < 0:
            raise WakefulError(f"shared_queries: group must not be negative, got {group}")
        self.group = group

    def source(self, layer: int) -> Source:
        return Source(query=_leader(layer, self.group), key=layer, value=layer)
