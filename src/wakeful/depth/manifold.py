"""Manifold-constrained hyper-connections: parallel streams with norm-preserving mixing."""

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.depth.base import State, SublayerMix
from wakeful.errors import WakefulError
from wakeful.variants.roles import Role
from wakeful.variants.shape import Shape

_EPS = 1e-6
Mixing = Literal["sinkhorn", "identity"]


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

    name = "mhc"
    examples = ("mhc", 'mhc(streams=3, mixing="identity")')

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

    Columns sum to 1 within 1e-6; rows come closer to 1 with every iteration.
    """
    shares = logits.softmax(-1) + _EPS  # the rows sum to 1 already
    shares = shares / (shares.sum(-2, keepdim=True) + _EPS)
    for _ in range(iterations - 1):
        shares = shares / (shares.sum(-1, keepdim=True) + _EPS)
        shares = shares / (shares.sum(-2, keepdim=True) + _EPS)
    return shares
