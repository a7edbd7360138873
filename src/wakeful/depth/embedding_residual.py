"""Embedding residual: the input of each block but the first is mixed with the embedding."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from wakeful.depth.base import DepthMix
from wakeful.variants.shape import Shape


class EmbeddingResidual(DepthMix):
    """x_n = (1 − w) X_n + w X_0, w = ½: the hidden-state residual (reported worse than none).

    The counterpart of ResFormer's eq. 7 for hidden states H_0. It is applied before every block
    but the first, and not after the last, whose output goes to the head.
    """

    name = "embedding_residual"
    examples = ("embedding_residual",)
    neutral = "embedding_residual(weight=0.0)"

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

    name = "x0_lambdas"
    examples = ("x0_lambdas", "x0_lambdas(start=0.0)")
    neutral = "x0_lambdas(start=0.0)"

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
