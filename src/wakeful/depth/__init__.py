"""Depth mixes: what a block, or each half of it, receives from the residual stream."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.shape import Shape
from wakeful.variants import Variant

__all__ = ["DenseFormer", "DepthMix", "EmbeddingResidual", "Residual", "State", "SublayerMix"]


class DepthMix(Variant, nn.Module, ABC):
    """The stream x_n after block n, made of the embedding X_0 and the blocks' outputs X_1 … X_n.

    Hiddens are numbered as in the formulas: 0 is the embedding, n the output of the n-th block.
    """

    def __init__(self) -> None:
        super().__init__()

    def attach(self, shape: Shape) -> None:
        """Make the parameters for a decoder of this shape."""
        self.num_layers = shape.num_layers

    def reads(self, number: int) -> frozenset[int]:
        """Return the earlier hiddens needed after block `number` (its own output left out)."""
        return frozenset()

    def start_plain(self) -> str:
        """Set the parameters to the plain stream; return what is changed all the same, or ""."""
        return "" if str(self) == self.neutral else f"{self} changes the stream between blocks"

    def take_over(self, reference: "DepthMix", sources: Sequence[int]) -> None:
        """Copy what the same mix has learned in a decoder whose layer `sources[n]` is layer n here.

        Layers marked −1 are new and keep their own. Call it after `start_plain`.

        Raises:
            WakefulError: what was learned has no meaning for layers in this order.
        """
        if next(self.parameters(), None) is not None:
            raise WakefulError(f"{self} has parameters that another depth cannot inherit")

    def forward(self, number: int, x: Tensor, hiddens: Mapping[int, Tensor]) -> Tensor:
        """Return the stream (B, L, D) that follows block `number`, whose plain output is `x`."""
        return x


State = tuple[Tensor, ...]


class SublayerMix(DepthMix):
    """A depth mix that decides what each sublayer reads and what becomes of its output.

    Sublayers are numbered from 1: block n's attention is 2n − 1, its feed-forward network 2n.
    `state` is what the mix carries along: the embedding, all earlier outputs, parallel streams. The
    plain stream would be `begin(x) = x, ()` and `step(number, x, out, state) = x + out, ()`.
    """

    @abstractmethod
    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        """Return what the first sublayer reads, and the state, given the embedding X_0."""

    @abstractmethod
    def step(self, number: int, x: Tensor, out: Tensor, state: State) -> tuple[Tensor, State]:
        """Return what follows sublayer `number`, which read `x` and put out `out`, and the state.

        That is what the next sublayer reads or, after the last, the final norm. All are (B, L, D).
        """

    def projected(self, number: int, x: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the query, key and value projections of attention `number` read.

        Where a mix overrides this, the attention's norm is applied to each of the three.
        """
        return x, x, x


class Residual(DepthMix):
    """x_n = X_n: the block's output, unchanged (the vanilla Transformer)."""

    examples = ("residual",)
    neutral = "residual"


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


class DenseFormer(DepthMix):
    """x_n = Σ_{j≤n} α_{n,j} X_j over the embedding and the blocks' outputs.

    After Pagliardini et al. 2024 (eq. 9 of Value Residual Learning is a simplification of it).
    α starts one-hot at j = n, the plain stream. Sparser forms: with `dilation` k only the j with
    n − j divisible by k enter; with `period` p only every p-th block is followed by an average.
    X_j is the output of block j before its own average: X_j = B_j(x_{j−1}).
    """

    examples = ("denseformer", "denseformer(dilation=2)", "denseformer(period=2)")
    neutral = "denseformer"

    def __init__(self, *, dilation: int = 1, period: int = 1) -> None:
        super().__init__()
        if dilation < 1 or period < 1:
            raise WakefulError(
                f"denseformer: dilation and period count from 1, got {dilation} and {period}"
            )
        self.dilation = dilation
        self.period = period

    def attach(self, shape: Shape) -> None:
        super().attach(shape)
        self.weights = nn.ParameterDict()
        for number in range(1, shape.num_layers + 1):
            if number % self.period == 0:
                terms = len(self._terms(number)) + 1
                start = torch.zeros(terms)
                start[-1] = 1.0
                self.weights[str(number)] = nn.Parameter(start)
        if not self.weights:
            raise WakefulError(
                f"denseformer: period {self.period} is longer than the {shape.num_layers} layers"
            )

    @torch.no_grad()
    def start_plain(self) -> str:
        for weights in self.weights.values():
            weights.zero_()[-1] = 1.0
        return ""

    @torch.no_grad()
    def take_over(self, reference: DepthMix, sources: Sequence[int]) -> None:
        assert isinstance(reference, DenseFormer)
        inherited = [source for source in sources if source >= 0]
        if list(sources[: len(inherited)]) != list(range(len(inherited))):
            raise WakefulError(
                f"{self} averages over blocks by their number: only the first layers of the "
                f"reference keep theirs, not {list(sources)}"
            )
        for layer in range(len(inherited)):
            if str(layer + 1) in self.weights:
                self.weights[str(layer + 1)].copy_(reference.weights[str(layer + 1)])

    def reads(self, number: int) -> frozenset[int]:
        return frozenset(self._terms(number)) if number % self.period == 0 else frozenset()

    def forward(self, number: int, x: Tensor, hiddens: Mapping[int, Tensor]) -> Tensor:
        if number % self.period:
            return x
        weights = self.weights[str(number)].to(x.dtype).unbind()
        mixed = weights[-1] * x
        for weight, earlier in zip(weights[:-1], self._terms(number), strict=True):
            mixed = mixed + weight * hiddens[earlier]
        return mixed

    def _terms(self, number: int) -> list[int]:
        return [j for j in range(number) if (number - j) % self.dilation == 0]
