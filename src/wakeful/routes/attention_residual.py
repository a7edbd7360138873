"""A residual connection from the first layer's attention weights."""

from collections.abc import Iterable

import torch
from torch import Tensor

from wakeful.routes.base import Attend, Memory, Read, ValueRoute
from wakeful.shape import Shape


class AttentionResidual(ValueRoute):
    """U_n = ((1 − w) A_n + w A_1) V_n, w = ½ (Value Residual Learning, fig. 7: no gain).

    A reference for comparison: it attends twice a layer.
    """

    examples = ("attention_residual",)
    neutral = "attention_residual(weight=0.0)"

    def __init__(self, *, weight: float = 0.5) -> None:
        super().__init__()
        self.weight = weight

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, [layer for layer in layers if layer > 0])

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({Read("query", 0), Read("keys", 0)})

    def shares(self, layer: int) -> tuple[float, ...]:
        return self.weight, 1 - self.weight

    def attend(
        self, layer: int, attend: Attend, q: Tensor, keys: Tensor, values: Tensor, memory: Memory
    ) -> Tensor:
        first = attend(memory[Read("query", 0)], memory[Read("keys", 0)], values)
        return torch.lerp(attend(q, keys, values), first, self.weight)
