"""Cross-layer attention: the expensive thing that ResFormer approximates."""

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.routes.base import Attend, Memory, Read, ValueRoute
from wakeful.shape import Shape

Other = Literal["previous", "first"]


class CrossLayer(ValueRoute):
    """U_n = softmax(Q_n [K_n; K_m]ᵀ / √d) [V_n; V_m] (Value Residual Learning, eq. 2).

    m is the layer before (`other="previous"`, figs. 3 and 8) or the first. A reference: it doubles
    the attention's cost and takes an explicit mask.
    """

    examples = ("crosslayer", 'crosslayer(other="first")')

    def __init__(self, *, other: Other = "previous") -> None:
        super().__init__()
        if other not in get_args(Other):
            raise WakefulError(f"crosslayer: other must be one of {get_args(Other)}, got {other!r}")
        self.other: Other = other

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, [layer for layer in layers if layer > 0])

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({Read("keys", self._other(layer)), Read("values", self._other(layer))})

    def shares(self, layer: int) -> tuple[float, ...]:
        return ()

    def attend(
        self, layer: int, attend: Attend, q: Tensor, keys: Tensor, values: Tensor, memory: Memory
    ) -> Tensor:
        other = self._other(layer)
        both_keys = torch.cat([keys, memory[Read("keys", other)]], dim=1)
        both_values = torch.cat([values, memory[Read("values", other)]], dim=1)
        return attend(q, both_keys, both_values, copies=2)

    def _other(self, layer: int) -> int:
        return layer - 1 if self.other == "previous" else 0
