"""Alternatives to ResFormer: other residuals from earlier layers, and cross-layer attention.

The references of Value Residual Learning, written for comparison and not for speed.
"""

from typing import Literal

import torch
from torch import Tensor

from wakeful.routes.base import QKV, Attend, Memory, Read, ValueRoute

FIRST_QUERY = Read("query", 0)
FIRST_KEYS = Read("keys", 0)
Other = Literal["previous", "first"]


class _Residual(ValueRoute):
    from_second = True

    def __init__(self, *, weight: float = 0.5) -> None:
        super().__init__()
        self.weight = weight


class _Projection(_Residual):
    """X'_n = (1 − w) X_n + w X_m of the projections X that `mixes` names."""

    def earlier(self, layer: int) -> Read:
        """Return the tensor X_m, by default the first layer's."""
        (kind,) = self.mixes
        return Read(kind, 0)

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({self.earlier(layer)})

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        """Mix this layer's projection with the earlier layer's."""
        earlier = self.earlier(layer)
        field = earlier.kind[0]  # "query", "key", "value" are q, k, v in `QKV`
        mixed = torch.lerp(getattr(qkv, field), memory[earlier], self.weight)
        return qkv._replace(**{field: mixed})


class QueryResidual(_Projection):
    """Q'_n = (1 − w) Q_n + w Q_1, w = ½ (Value Residual Learning, fig. 7: no gain).

    RoPE is linear and the same in every layer, so mixing rotated queries is mixing queries.
    """

    name = "query_residual"
    examples = ("query_residual",)
    neutral = "query_residual(weight=0.0)"
    mixes = frozenset({"query"})


class KeyResidual(_Projection):
    """K'_n = (1 − w) K_n + w K_1, w = ½: the same of keys."""

    name = "key_residual"
    examples = ("key_residual",)
    neutral = "key_residual(weight=0.0)"
    mixes = frozenset({"key"})


class PreviousValue(_Projection):
    """`V'_n = (1 − w) V_n + w V_{n−1}`, w = ½ (Value Residual Learning, fig. 9: worse than V_1)."""

    name = "previous_value"
    examples = ("previous_value",)
    neutral = "previous_value(weight=0.0)"
    mixes = frozenset({"value"})

    def earlier(self, layer: int) -> Read:
        return Read("value", layer - 1)


class AttentionResidual(_Residual):
    """U_n = ((1 − w) A_n + w A_1) V_n, w = ½ (Value Residual Learning, fig. 7: no gain).

    A_1 is the first layer's attention as that layer computes it, its scale and its sink included.
    A reference for comparison: it attends twice a layer.
    """

    name = "attention_residual"
    examples = ("attention_residual",)
    neutral = "attention_residual(weight=0.0)"

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({FIRST_QUERY, FIRST_KEYS, Read("sink", 0)})

    def shares(self, layer: int) -> tuple[float, ...]:
        return self.weight, 1 - self.weight

    def attend(
        self, layer: int, attend: Attend, q: Tensor, keys: Tensor, values: Tensor, memory: Memory
    ) -> Tensor:
        """Return the mean of two attention outputs over this layer's values, by A_1 and by A_n."""
        first = attend(memory[FIRST_QUERY], memory[FIRST_KEYS], values, like=0)
        return torch.lerp(attend(q, keys, values), first, self.weight)


class IdentityMapping(ValueRoute):
    """U_n = A_n V_n + mean_{i<n} V_i (Value Residual Learning, eq. 6; figs. 3, 8: poor).

    A reference: it shows that earlier values have to pass through the attention.
    """

    name = "identity_mapping"
    examples = ("identity_mapping",)
    from_second = True

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset(Read("value", earlier) for earlier in range(layer))

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        earlier = [memory[Read("value", number)] for number in range(layer)]
        mean = torch.stack(earlier).mean(0)
        return u + mean.repeat_interleave(u.shape[2] // v.shape[2], dim=2)


class CrossLayer(ValueRoute):
    """U_n = softmax(Q_n [K_n; K_m]ᵀ / √d) [V_n; V_m] (Value Residual Learning, eq. 2).

    m is the previous layer (`other="previous"`, fig. 3) or the first (fig. 8). A reference: it
    doubles the attention's cost and needs an explicit mask.
    """

    examples = ("crosslayer", 'crosslayer(other="first")')
    from_second = True

    def __init__(self, *, other: Other = "previous") -> None:
        super().__init__()
        self.other: Other = other

    def reads(self, layer: int) -> frozenset[Read]:
        source = self._source_layer(layer)
        return frozenset({Read("keys", source), Read("values", source)})

    def shares(self, layer: int) -> tuple[float, ...]:
        return ()

    def attend(
        self, layer: int, attend: Attend, q: Tensor, keys: Tensor, values: Tensor, memory: Memory
    ) -> Tensor:
        """Return attention over this layer's and layer m's keys and values, one after the other."""
        source = self._source_layer(layer)
        both_keys = torch.cat([keys, memory[Read("keys", source)]], dim=1)
        both_values = torch.cat([values, memory[Read("values", source)]], dim=1)
        return attend(q, both_keys, both_values, copies=2)

    def _source_layer(self, layer: int) -> int:
        return layer - 1 if self.other == "previous" else 0
