"""Depth mixes of the papers' figures and of the arena, for `model.depth`, such as
`wakeful_papers.depth:X0Lambdas`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from wakeful.depth import DepthMix, State, SublayerMix
from wakeful.errors import WakefulError
from wakeful.variants.shape import Shape

_LEAST = 1e-3
"""Least α² of `ResidualGate`: its root has no gradient at 0."""


class EmbeddingResidual(DepthMix):
    """x_n = (1 − w) X_n + w X_0, w = ½: the hidden-state residual (reported worse than none).

    The counterpart of ResFormer's eq. 7 for hidden states H_0. It is applied before every block
    but the first, and not after the last, whose output goes to the head.
    """

    examples = ("wakeful_papers.depth:EmbeddingResidual",)
    neutral = "wakeful_papers.depth:EmbeddingResidual(weight=0.0)"

    def __init__(self, *, weight: float = 0.5) -> None:
        super().__init__()
        self.weight = weight

    def reads(self, number: int) -> frozenset[int]:
        return frozenset({0}) if number < self.num_layers else frozenset()

    def forward(self, number: int, x: Tensor, hiddens: Mapping[int, Tensor]) -> Tensor:
        return torch.lerp(x, hiddens[0], self.weight) if number < self.num_layers else x


class X0Lambdas(DepthMix):
    """h ← a_n h + b_n h_0 before block n, two numbers a block: nanochat's lambdas.

    `resid_lambdas` and `x0_lambdas` of nanochat/gpt.py (Karpathy, github.com/karpathy/nanochat),
    after modded-nanogpt. a starts at 1 and b at `start`, 0.1 there. Nanochat also normalizes the
    embedding h_0 once; here it stays as it is.
    """

    examples = ("wakeful_papers.depth:X0Lambdas", "wakeful_papers.depth:X0Lambdas(start=0.0)")
    neutral = "wakeful_papers.depth:X0Lambdas(start=0.0)"

    def __init__(self, *, start: float = 0.1) -> None:
        super().__init__()
        self.start = start

    def attach(self, shape: Shape) -> None:
        super().attach(shape)
        self.stream = nn.Parameter(torch.ones(shape.num_layers))
        self.embedded = nn.Parameter(torch.full((shape.num_layers,), self.start))

    @torch.no_grad()
    def start_plain(self) -> str:
        self.stream.fill_(1.0)
        self.embedded.zero_()
        return ""

    @torch.no_grad()
    def take_over(self, reference: DepthMix, sources: Sequence[int]) -> None:
        """Copy both numbers of each layer n from layer `sources[n]` of the reference; −1 is new."""
        assert isinstance(reference, X0Lambdas)
        for layer, source in enumerate(sources):
            if source >= 0:
                self.stream[layer] = reference.stream[source]
                self.embedded[layer] = reference.embedded[source]

    def reads(self, number: int) -> frozenset[int]:
        return frozenset({0}) if number < self.num_layers else frozenset()

    def first(self, x: Tensor) -> Tensor:
        return self._mixed(0, x, x)

    def forward(self, number: int, x: Tensor, hiddens: Mapping[int, Tensor]) -> Tensor:
        return self._mixed(number, x, hiddens[0]) if number < self.num_layers else x

    def _mixed(self, block: int, x: Tensor, embedded: Tensor) -> Tensor:
        return self.stream[block].to(x.dtype) * x + self.embedded[block].to(x.dtype) * embedded


class ResidualGate(SublayerMix):
    """x ← α ⊙ x + β ⊙ F(x), β = σ(w / T), α = √(1 − β²), one w per channel and sublayer.

    As in Muse Spark (Transformers' `MuseSparkResidualGate`), T = `temperature`; α² is at least
    1e-3. If x and F(x) are uncorrelated with equal variance, the sum has that variance too. w
    starts at 0, so β = ½ and α = 0.87; Muse Spark draws it with standard deviation 0.02.
    """

    examples = (
        "wakeful_papers.depth:ResidualGate",
        "wakeful_papers.depth:ResidualGate(temperature=1.0)",
    )

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
