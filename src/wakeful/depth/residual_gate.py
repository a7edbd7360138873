"""Residual gates: each channel's share of what a sublayer puts out, the sum's variance kept."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from wakeful.depth.base import State, SublayerMix
from wakeful.errors import WakefulError
from wakeful.variants.shape import Shape

_LEAST = 1e-3
"""Of α², whose root has no slope at 0."""


class ResidualGate(SublayerMix):
    """x ← α ⊙ x + β ⊙ F(x), β = σ(w / T) and α = √(1 − β²), w a number a channel and sublayer.

    As in Muse Spark (Transformers' `MuseSparkResidualGate`), T = `temperature`; α² is at least
    1e-3. Where x and F(x) have one variance and nothing in common, their sum has it too. w starts
    at 0, β = ½ and α = 0.87; theirs is drawn with deviation 0.02.
    """

    name = "residual_gate"
    examples = ("residual_gate", "residual_gate(temperature=1.0)")

    def __init__(self, *, temperature: float = 0.3) -> None:
        super().__init__()
        if temperature <= 0:
            raise WakefulError(f"residual_gate: temperature must be positive, got {temperature:g}")
        self.temperature = temperature

    def attach(self, shape: Shape) -> None:
        super().attach(shape)
        self.gates = nn.ParameterList(torch.zeros(shape.width) for _ in range(2 * shape.num_layers))

    def single_channels(self) -> Mapping[str, str]:
        return {"stream": "has gates for each of"}

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        return x, ()

    def step(self, number: int, x: Tensor, out: Tensor, state: State) -> tuple[Tensor, State]:
        gate = self.gates[number - 1].to(x.dtype) / self.temperature
        added = gate.sigmoid()
        kept = ((-gate).sigmoid() * (1 + added)).clamp_min(_LEAST).sqrt()
        return kept * x + added * out, state
