"""Earlier values added as they are, not through the attention."""

from collections.abc import Iterable

import torch
from torch import Tensor

from wakeful.routes.base import Memory, Read, ValueRoute
from wakeful.shape import Shape


class IdentityMapping(ValueRoute):
    """U_n = A_n V_n + mean_{i<n} V_i (Value Residual Learning, eq. 6; figs. 3, 8: poor).

    A reference: it shows that earlier values have to pass through the attention.
    """

    examples = ("identity_mapping",)

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, [layer for layer in layers if layer > 0])
        self.repeats = shape.num_heads // shape.num_kv_heads

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset(Read("value", earlier) for earlier in range(layer))

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        earlier = [memory[Read("value", number)] for number in range(layer)]
        mean = torch.stack(earlier).mean(0)
        return u + mean.repeat_interleave(self.repeats, dim=2)
