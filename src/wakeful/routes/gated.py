"""Gated first value: each token and head adds V_1 times a learned gate."""

from typing import Literal

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.routes.base import FIRST_VALUE, QKV, Memory, Read
from wakeful.routes.gates import Gates
from wakeful.variants.shape import Shape

Gate = Literal["sigmoid", "relu", "mix"]
_NEARLY_SHUT = 1e-3
"""Factor on the weights W of ReLU gates in models that inherit plain blocks."""


class Gated(Gates):
    """V'_n = V_n + g(h_n) V_1, one gate per key/value head and token; g by `gate`:

    * `sigmoid`: g = sigmoid(W h_n + b), W from zero and b from `start`: ½ at the start by default.
    * `relu`: g = relu(W h_n) (SATFormer, 2605.03953, and its code), W drawn with deviation 0.02.
    * `mix`: V'_n = V_1 + g (V_n − V_1) with the sigmoid's g (x-transformers' learned mix of value
      residuals, with our start).

    h_n is the normalized input of layer n's attention; with `channels` W reads only its first
    channels, as the gates of modded-nanogpt and nanochat read 12.
    """

    examples = ("gated", 'gated(gate="relu")', 'gated(gate="mix")', "gated(channels=12)")
    neutral = "gated(start=-40.0)"
    mixes = frozenset({"value"})
    from_second = True

    def __init__(self, *, start: float = 0.0, gate: Gate = "sigmoid", channels: int = 0) -> None:
        """Store the options and choose the gates' bias and start.

        Raises:
            WakefulError: ReLU gates, which have no bias, are given a `start`.
        """
        if gate == "relu" and start:
            raise WakefulError('gated: start is used by gate="sigmoid" and "mix" only, not "relu"')
        super().__init__(start=start, channels=channels)
        self.gate: Gate = gate
        # At this bias the route hardly changes the layer's values: g is nearly 0, or in "mix",
        # where it is their share, nearly 1.
        self.plain_bias = 8.0 if gate == "mix" else -8.0
        self.biased = gate != "relu"
        # ReLU has no gradient at W = 0, so W starts as in the authors' code.
        self.deviation = 0.02 if gate == "relu" else 0.0

    def width(self, shape: Shape) -> int:
        return shape.num_kv_heads

    @torch.no_grad()
    def start_plain(self) -> str:
        """Set the gates so that the route hardly changes the layers' values, but the gates can
        still learn; return a sentence on what the route changes.
        """
        if self.gate != "relu":
            return super().start_plain()
        for weight in self.gates.parameters():
            weight.mul_(_NEARLY_SHUT)
        return f"{self} starts with gates of {_NEARLY_SHUT:g} of their size, for zero cannot learn"

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({FIRST_VALUE})

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        """Return the heads with this layer's values V mixed with the first layer's V_1.

        With W h + b the gates' logits, they are V + relu(W h) V_1, V_1 + σ(W h + b) (V − V_1) for
        "mix", or V + σ(W h + b) V_1 for "sigmoid".
        """
        logits = self.gate_logits(layer, x).unsqueeze(-1)
        first = memory[FIRST_VALUE]
        if self.gate == "relu":
            return qkv._replace(v=torch.addcmul(qkv.v, logits.relu(), first))
        gate = logits.sigmoid()
        if self.gate == "mix":
            return qkv._replace(v=torch.lerp(first, qkv.v, gate))
        return qkv._replace(v=qkv.v + gate * first)
