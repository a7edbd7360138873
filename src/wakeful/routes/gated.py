"""Gates on V_1: each token and head takes as much of the first layer's value as it opens for."""

from typing import Literal

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.routes.base import FIRST_VALUE, QKV, Memory, Read
from wakeful.routes.gates import Gates
from wakeful.variants.shape import Shape

Gate = Literal["sigmoid", "relu", "mix"]
_NEARLY_SHUT = 1e-3
"""What a relu's W is multiplied by for plain blocks."""


class Gated(Gates):
    """V'_n = V_n + g(h_n) V_1, one gate a key/value head and token; g by `gate`:

    * `sigmoid`: g = sigmoid(W h_n + b), W from zero and b from `start`: ½ at the start by default.
    * `relu`: g = relu(W h_n) (SATFormer, 2605.03953, and its code), W drawn with deviation 0.02.
    * `mix`: V'_n = V_1 + g (V_n − V_1) with the sigmoid's g (x-transformers' learned mix of value
      residuals, with our start).

    h_n is the normalized input of layer n's attention; with `channels` W reads only its first
    channels alone, as the gates of modded-nanogpt and nanochat read 12.
    """

    examples = ("gated", 'gated(gate="relu")', 'gated(gate="mix")', "gated(channels=12)")
    neutral = "gated(start=-40.0)"
    mixes = frozenset({"value"})
    from_second = True

    def __init__(self, *, start: float = 0.0, gate: Gate = "sigmoid", channels: int = 0) -> None:
        if gate == "relu" and start:
            raise WakefulError('gated: start is used by gate="sigmoid" and "mix" only, not "relu"')
        super().__init__(start=start, channels=channels)
        self.gate: Gate = gate
        self.nearly = 8.0 if gate == "mix" else -8.0
        self.biased = gate != "relu"
        # No gradient reaches a relu's zero, so W starts as the authors' does.
        self.deviation = 0.02 if gate == "relu" else 0.0

    def width(self, shape: Shape) -> int:
        return shape.num_kv_heads

    @torch.no_grad()
    def start_plain(self) -> str:
        if self.gate != "relu":
            return super().start_plain()
        for weight in self.gates.parameters():
            weight.mul_(_NEARLY_SHUT)
        return f"{self} starts with gates of {_NEARLY_SHUT:g} of their size, for zero cannot learn"

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({FIRST_VALUE})

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        opening = self.opening(layer, x).unsqueeze(-1)
        first = memory[FIRST_VALUE]
        if self.gate == "relu":
            return qkv._replace(v=torch.addcmul(qkv.v, opening.relu(), first))
        gate = opening.sigmoid()
        if self.gate == "mix":
            return qkv._replace(v=torch.lerp(first, qkv.v, gate))
        return qkv._replace(v=qkv.v + gate * first)
