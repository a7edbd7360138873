"""Depth mixes of the papers' figures and of the arena, for `model.depth`, such as
`wakeful_papers.depth:X0Lambdas`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.depth import DepthMix, State, SublayerMix
from wakeful.depth.mudd import weighted
from wakeful.errors import WakefulError
from wakeful.variants.roles import Role
from wakeful.variants.shape import Shape

_EPS = 1e-6
Mixing = Literal["sinkhorn", "identity"]
_MIN_ALPHA_SQUARED = 1e-3
"""Lower bound of α² in `ResidualGate`: the root has no gradient at 0."""


class EmbeddingResidual(DepthMix):
    """x_n = (1 − w) H_n + w H_0, w = ½: the hidden-state residual (reported worse than none).

    The counterpart of ResFormer's eq. 7 for hidden states: H_n is the output of block n, H_0 the
    embedding, and x_n the input of block n + 1. The last block's output goes to the head unmixed.
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
    """h ← a_n h + b_n h_0 before block n, two numbers per block: nanochat's lambdas.

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
        alpha = ((-gate).sigmoid() * (1 + beta)).clamp_min(_MIN_ALPHA_SQUARED).sqrt()
        return alpha * x + beta * out, state


class AttentionResiduals(SublayerMix):
    """h_s = Σ_j p_j v_j, p = softmax_j(w_s · RMSNorm(v_j)), w_s = 0 at the start.

    Attention Residuals (Kimi Team 2026, arXiv 2603.15031, section 3 and figure 2). v_0 is the
    embedding and v_j the output of sublayer j; the final norm reads such a sum as well. With
    `layers` the outputs of that many layers are summed as usual and count as one v (Block AttnRes),
    the block that is not complete yet among them. RMSNorm has no scale here, which w could take
    over.
    """

    examples = (
        "wakeful_papers.depth:AttentionResiduals",
        "wakeful_papers.depth:AttentionResiduals(layers=3)",
    )

    def __init__(self, *, layers: int = 0) -> None:
        super().__init__()
        if layers < 0:
            raise WakefulError(f"attention_residuals: layers must not be negative, got {layers}")
        self.layers = layers

    def attach(self, shape: Shape) -> None:
        """Create a query vector w = 0 for each reader: sublayers from 2 (the first reads the
        embedding alone) to 2N, and the final norm, 2N + 1.
        """
        super().attach(shape)
        self.queries = nn.ParameterDict(
            {
                str(reader): nn.Parameter(torch.zeros(shape.width))
                for reader in range(2, 2 * shape.num_layers + 2)
            }
        )

    def roles(self) -> Mapping[str, Role]:
        return {f"queries.{reader}": Role(residual=0) for reader in self.queries}

    @torch.no_grad()
    def take_over(self, reference: DepthMix, sources: Sequence[int]) -> None:
        """Copy parameters, named `kind.reader`, from the readers that these were in the reference:
        those of layer `sources[n]` for layer n, and the final norm.
        """
        parameters = dict(reference.named_parameters())
        final_norm, reference_final_norm = 2 * len(sources) + 1, 2 * reference.num_layers + 1
        source_of = {final_norm: reference_final_norm}
        for layer, source in enumerate(sources):
            if source >= 0:  # its attention is reader 2 · layer + 1, its MLP the next
                source_of[2 * layer + 1] = 2 * source + 1
                source_of[2 * layer + 2] = 2 * source + 2
        for name, parameter in self.named_parameters():
            kind, reader = name.split(".")
            source_name = f"{kind}.{source_of.get(int(reader))}"
            if source_name in parameters:
                parameter.copy_(parameters[source_name])

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def step(self, number: int, x: Tensor, out: Tensor, state: State) -> tuple[Tensor, State]:
        """Append the output to the state, which holds the embedding and all outputs so far; return
        their softmax-weighted sum, the next input, and the state.
        """
        if self.layers and (number - 1) % (2 * self.layers):  # outputs of a block of layers add up
            state = (*state[:-1], state[-1] + out)
        else:
            state = (*state, out)
        return weighted(self.logits(number + 1, state).softmax(0), state), state

    def logits(self, reader: int, outputs: Sequence[Tensor]) -> Tensor:
        """Return w · RMSNorm(v_j) (J, B, L) of a reader (from 1) for J earlier outputs v_j."""
        query = self.queries[str(reader)]  # as RMSNorm's weight: the sum is the dot product
        return torch.stack(
            [F.rms_norm(v, v.shape[-1:], query.to(v.dtype), _EPS).sum(-1) for v in outputs]
        )


class ManifoldHyperConnections(SublayerMix):
    """h = Σ_i a_i H_i; H_j ← Σ_i M_ij H_i + b_j F(h), M doubly stochastic, over n = `streams`.

    mHC (Xie et al. 2025, arXiv 2512.24880, eqs. 7–9; DeepSeek V4). With Ĥ = H / RMS(H), one RMS per
    token over all n D channels of its streams, a map W_i per stream and constants β,

        (ã, b̃, M̃) = α ⊙ Σ_i W_i Ĥ_i + β,    a = σ(ã),    b = 2 σ(b̃),    M = Sinkhorn(softmax(M̃)),

    the rows' softmax followed by `iterations` divisions by the columns' sums, each but the first
    after one by the rows'. The final norm reads Σ_i a_i H_i of a map of its own (DeepSeek V4's;
    GLM-5.3-Flash takes the mean). `mixing="identity"` has M = 1: iHC, Hy 4's. All streams begin as
    the embedding.

    α starts at 0.01 (table 5 of the paper). It states nothing of the rest: W is drawn with
    deviation 0.02 and β starts at 0 (Transformers' `DeepseekV4HyperConnection`), but for ã at
    −ln(n − 1), so that a is 1 / n (Hy 4's in Transformers). Of the ε = 1e-6 that both models add
    here and there, those of the sums are kept.
    """

    examples = (
        "wakeful_papers.depth:ManifoldHyperConnections",
        'wakeful_papers.depth:ManifoldHyperConnections(streams=3, mixing="identity")',
    )

    def __init__(
        self, *, streams: int = 4, iterations: int = 20, mixing: Mixing = "sinkhorn"
    ) -> None:
        super().__init__()
        if streams < 1 or iterations < 1:
            raise WakefulError(
                f"mhc: streams and iterations must be at least 1, got {streams} and {iterations}"
            )
        if mixing not in get_args(Mixing):
            raise WakefulError(f"mhc: mixing must be one of {get_args(Mixing)}, got {mixing!r}")
        self.streams = streams
        self.iterations = iterations
        self.mixing: Mixing = mixing

    def attach(self, shape: Shape) -> None:
        """Create W (`maps`), β (`biases`) and α (`scales`), which make the weights of the streams,
        for each sublayer and the final norm.
        """
        super().attach(shape)
        n = self.streams
        # The numbers of ã, b̃ and M̃; the final norm only reads, and has ã alone.
        sizes = [n, n] if self.mixing == "identity" else [n, n, n * n]
        sizes_of_readers = [sizes] * (2 * shape.num_layers) + [[n]]
        self.maps = nn.ParameterList(
            torch.zeros(n * sum(sizes), shape.width) for sizes in sizes_of_readers
        )
        self.biases = nn.ParameterList(torch.zeros(sum(sizes)) for sizes in sizes_of_readers)
        self.scales = nn.ParameterList(
            torch.full((len(sizes),), 0.01) for sizes in sizes_of_readers
        )
        with torch.no_grad():
            for weight, bias in zip(self.maps, self.biases, strict=True):
                nn.init.normal_(weight, std=0.02)
                bias[:n] = -math.log(max(n - 1, 1))  # a = 1 / n

    def roles(self) -> Mapping[str, Role]:
        reads = Role(residual=1, decays=True)
        return {f"maps.{sublayer}": reads for sublayer in range(2 * self.num_layers + 1)}

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        return self._read(0, x.unsqueeze(-2).expand(*x.shape[:-1], self.streams, -1))

    def step(self, number: int, x: Tensor, out: Tensor, state: State) -> tuple[Tensor, State]:
        mixed, depth = state
        return self._read(number, torch.addcmul(mixed, depth.unsqueeze(-1), out.unsqueeze(-2)))

    def _read(self, sublayer: int, streams: Tensor) -> tuple[Tensor, State]:
        """Return the input (B, L, D) of a sublayer, from 0, that the streams (B, L, n, D) give, and
        the state for writing its output back.

        The state holds the mixed streams (B, L, n, D), and the weight (B, L, n) of the output in
        each; it is empty before the final norm.
        """
        n, scales = self.streams, self.scales[sublayer]
        wide = torch.promote_types(streams.dtype, torch.float32)
        normed = F.rms_norm(streams.flatten(-2).to(wide), (n * streams.shape[-1],), eps=_EPS)
        weight = self.maps[sublayer].unflatten(0, (n, -1)).transpose(0, 1).flatten(1)
        products = F.linear(normed, weight.to(wide)).to(wide)  # Σ_i W_i Ĥ_i
        sizes = [n, n, n * n][: len(scales)]
        logits = [  # ã, b̃ and M̃, as many as this reader has
            torch.addcmul(bias, scale, product)
            for bias, scale, product in zip(
                self.biases[sublayer].to(wide).split(sizes),
                scales.to(wide).unbind(),
                products.split(sizes, -1),
                strict=True,
            )
        ]
        a = logits[0].sigmoid().to(streams.dtype)
        read = (a.unsqueeze(-1) * streams).sum(-2)
        if len(logits) == 1:
            return read, ()
        b = (2 * logits[1].sigmoid()).to(streams.dtype)
        if len(logits) == 2:  # M = 1
            return read, (streams, b)
        m = sinkhorn(logits[2].unflatten(-1, (n, n)), self.iterations).to(streams.dtype)
        return read, (m.transpose(-1, -2) @ streams, b)


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Return nearly doubly stochastic matrices (*, n, n) for logits (*, n, n).

    Columns sum to 1 but for `_EPS`; rows come closer to 1 with every iteration.
    """
    shares = logits.softmax(-1) + _EPS  # the rows sum to 1 already
    shares = shares / (shares.sum(-2, keepdim=True) + _EPS)
    for _ in range(iterations - 1):
        shares = shares / (shares.sum(-1, keepdim=True) + _EPS)
        shares = shares / (shares.sum(-2, keepdim=True) + _EPS)
    return shares
