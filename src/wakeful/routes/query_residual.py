"""A residual connection from the first layer's queries."""

from collections.abc import Iterable

import torch
from torch import Tensor

from wakeful.routes.base import QKV, Memory, Read, ValueRoute
from wakeful.shape import Shape

FIRST_QUERY = Read("query", 0)


class QueryResidual(ValueRoute):
    """Q'_n = (1 − w) Q_n + w Q_1, w = ½ (Value Residual Learning, fig. 7: no gain).

    RoPE is linear and the same in every layer, so mixing rotated queries is mixing queries.
    """

    examples = ("query_residual",)
    neutral = "query_residual(weight=0.0)"
    mixes = frozenset({"query"})

    def __init__(self, *, weight: float = 0.5) -> None:
        super().__init__()
        self.weight = weight

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, [layer for layer in layers if layer > 0])

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({FIRST_QUERY})

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        return qkv._replace(q=torch.lerp(qkv.q, memory[FIRST_QUERY], self.weight))
