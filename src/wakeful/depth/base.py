"""Base classes of depth mixes, which compute the stream after each block or sublayer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.variants import Variant
from wakeful.variants.shape import Shape


class DepthMix(Variant, nn.Module, ABC):
    """The stream x_n after block n, a function of the embedding X_0 and block outputs X_1 … X_n.

    Hidden states are numbered as in the formulas: 0 is the embedding, n the n-th block's output.
    """

    def __init__(self) -> None:
        super().__init__()

    def attach(self, shape: Shape) -> None:
        """Create the parameters for a decoder of this shape."""
        self.num_layers = shape.num_layers

    def reads(self, number: int) -> frozenset[int]:
        """Return the numbers of the earlier hidden states that `forward` needs after block
        `number`. That block's own output is not among them.
        """
        return frozenset()

    def first(self, x: Tensor) -> Tensor:
        """Return the first block's input, given the embedding X_0, both (B, L, D)."""
        return x

    def single_channels(self) -> Mapping[str, str]:
        """Describe operations on single channels; see `ValueRoute.single_channels`."""
        return {}

    def start_plain(self) -> str:
        """Return a sentence on what the mix changes in a model whose blocks are copied from one
        with the plain residual stream; "" if nothing.

        A subclass with parameters first sets them so that the stream is the plain one, or as close
        as it can be. This base class sets none.
        """
        return "" if str(self) == self.neutral else f"{self} changes the stream between blocks"

    def take_over(self, reference: "DepthMix", sources: Sequence[int]) -> None:
        """Copy the trained parameters of `reference`, the same mix in another decoder.

        Layer n here was layer `sources[n]` there. Where that is −1, a new layer, the parameters
        stay as `start_plain` has set them. This base class has no parameters to copy.

        Raises:
            WakefulError: the parameters do not apply to layers in this order.
        """
        if next(self.parameters(), None) is not None:  # a subclass that does not override this
            raise WakefulError(f"{self} has parameters that another depth cannot inherit")

    def first_layers(self, sources: Sequence[int]) -> int:
        """Return the number k of inherited layers, after a check that layers 0 to k − 1 here are
        layers 0 to k − 1 of the reference.

        Layer n here was layer `sources[n]` there; −1 is a new layer.

        Raises:
            WakefulError: other layers are inherited, so that weights by a layer's number do not
                apply to them.
        """
        num_inherited = sum(source >= 0 for source in sources)
        if list(sources[:num_inherited]) != list(range(num_inherited)):
            raise WakefulError(
                f"{self} sums blocks by their number: only the first layers of the reference keep "
                f"theirs, not {list(sources)}"
            )
        return num_inherited

    def forward(self, number: int, x: Tensor, hiddens: Mapping[int, Tensor]) -> Tensor:
        """Return the stream (B, L, D) after block `number`, given the block's output `x`."""
        return x


State = tuple[Tensor, ...]


class SublayerMix(DepthMix):
    """A depth mix that computes each sublayer's input and adds its output to the stream.

    Sublayers are numbered from 1: block n's attention is 2n − 1, its feed-forward network 2n.
    `state` holds the mix's tensors, such as the embedding, earlier outputs or parallel streams. The
    plain stream would be `begin(x) = x, ()` and `step(number, x, out, state) = x + out, ()`.
    """

    @torch.no_grad()
    def take_over(self, reference: DepthMix, sources: Sequence[int]) -> None:
        """Copy the parameters of each layer n from layer `sources[n]` of `reference`, and those of
        the final norm from its final norm. A new layer, −1, keeps its parameters.

        A parameter is named `kind.sublayer`, perhaps with more after it. In names sublayers count
        from 0: layer n has 2n and 2n + 1, and the final norm 2N.
        """
        trained = dict(reference.named_parameters())
        # The final norm counts as layer N, and comes from the reference's final norm.
        layer_sources = [*sources, reference.num_layers]
        for name, parameter in self.named_parameters():
            kind, sublayer, *rest = name.split(".")
            source = layer_sources[int(sublayer) // 2]
            if source >= 0:
                source_sublayer = 2 * source + int(sublayer) % 2
                parameter.copy_(trained[".".join([kind, str(source_sublayer), *rest])])

    @abstractmethod
    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        """Return the first sublayer's input and the state, given the embedding X_0."""

    @abstractmethod
    def step(self, number: int, x: Tensor, out: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the next sublayer's input (after the last one, the final norm's) and the state.

        `x` is the input of sublayer `number` and `out` its output, all (B, L, D).
        """

    def qkv_inputs(self, number: int, x: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the query, key and value projections of sublayer `number`, an
        attention; its norm is still to be applied to each of them.

        By default all three are the sublayer's input `x`, and the norm is applied once.
        """
        return x, x, x


class Residual(DepthMix):
    """x_n = X_n: the block's output, unchanged (the vanilla Transformer)."""

    examples = ("residual",)
    neutral = "residual"
