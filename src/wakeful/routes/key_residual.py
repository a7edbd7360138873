"""A residual connection from the first layer's keys."""

from collections.abc import Iterable

import torch
from torch import Tensor

from wakeful.routes.base import QKV, Memory, Read, ValueRoute
from wakeful.shape import Shape

FIRST_KEY = Read("key", 0)


class KeyResidual(ValueRoute):
    """K'_n = (1 − w) K_n + w K_1, w = ½ (Value Residual Learning, fig. 7: no gain).

    RoPE is linear and the same in every layer, so mixing rotated keys is mixing keys.
    """

    examples = ("key_residual",)
    neutral = "key_residual(weight=0.0)"
    mixes = frozenset({"key"})

    def __init__(self, *, weight: float = 0.5) -> None:
        super().__init__()
        self.weight = weight

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, [layer for layer in layers if layer > 0])

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({FIRST_KEY})

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        return qkv._replace(k=torch.lerp(qkv.k, memory[FIRST_KEY], self.weight))
