"""Cross-layer attention sharing (CLA)."""

from wakeful.errors import WakefulError
from wakeful.routes.base import Source, ValueRoute


class CLA(ValueRoute):
    """Each `group` of consecutive layers shares its first layer's keys and values.

    The KV-efficient baseline of Value Residual Learning (figs. 4, 13), after Brandon et al. 2024.
    """

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
