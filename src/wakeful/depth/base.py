"""What a depth mix owes: the stream after each block, or around each sublayer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.variants import Variant
from wakeful.variants.shape import Shape


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

    def first(self, x: Tensor) -> Tensor:
        """Return what the first block receives, given the embedding X_0, both (B, L, D)."""
        return x

    def single_channels(self) -> Mapping[str, str]:
        """Say what it does with single channels, as `ValueRoute.single_channels` does."""
        return {}

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

    def first_layers(self, sources: Sequence[int]) -> int:
        """Return how many of a reference's first layers these are, those marked −1 left out.

        Raises:
            WakefulError: they are others, for which weights by number mean nothing.
        """
        inherited = [source for source in sources if source >= 0]
        if list(sources[: len(inherited)]) != list(range(len(inherited))):
            raise WakefulError(
                f"{self} sums blocks by their number: only the first layers of the reference keep "
                f"theirs, not {list(sources)}"
            )
        return len(inherited)

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

    @torch.no_grad()
    def take_over(self, reference: DepthMix, sources: Sequence[int]) -> None:
        """Copy parameters that are named `kind.sublayer`, counted from 0; 2N is the final norm."""
        theirs = dict(reference.named_parameters())
        ends = [*sources, reference.num_layers]
        for name, parameter in self.named_parameters():
            kind, sublayer, *rest = name.split(".")
            source = ends[int(sublayer) // 2]
            if source >= 0:
                number = str(2 * source + int(sublayer) % 2)
                parameter.copy_(theirs[".".join([kind, number, *rest])])

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

    reads_nulls = False
    """Whether `noticed` is told of every attention what it left of its weights."""

    def noticed(self, null: Tensor, state: State) -> State:
        """Return the state, given the share ψ of its weights that an attention gives to no key.

        ψ (B, L) is the mean over the heads of e^s / (e^s + Σ_j e^{x_j}), s the layer's sink or 0
        where it has none. It is told before the `step` of that attention.
        """
        return state


class Residual(DepthMix):
    """x_n = X_n: the block's output, unchanged (the vanilla Transformer)."""

    examples = ("residual",)
    neutral = "residual"
