"""Residual gates: sublayer outputs scaled per channel, such that the sum's variance is kept."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from wakeful.depth.base import State, SublayerMix
from wakeful.errors import WakefulError
from wakeful.variants.shape import Shape

_LEAST = 1e-3
"""Least α²: its root has no gradient at 0."""


class ResidualGate(SublayerMix):
    """x ← α ⊙ x + β ⊙ F(x), β = σ(w / T), α = √(1 − β²), one w per channel and sublayer.

    As in Muse Spark (Transformers' `MuseSparkResidualGate`), T = `temperature`; α² is at least
    1e-3. If x and F(x) are uncorrelated with equal variance, the sum has that variance too. w
    starts at 0, so β = ½ and α = 0.87; Muse Spark draws it with standard deviation 0.02.
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
        """Return α ⊙ x + β ⊙ F(x), F(x) being `out`; there is no state."""
        gate = self.gates[number - 1].to(x.dtype) / self.temperature
        beta = gate.sigmoid()
        # 1 − β² = (1 − β)(1 + β), and 1 − σ(g) = σ(−g), which does not cancel.
        alpha = ((-gate).sigmoid() * (1 + beta)).clamp_min(_LEAST).sqrt()
        return alpha * x + beta * out, state
