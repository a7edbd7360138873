"""DenseFormer: weighted averages of the blocks' outputs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from wakeful.depth.base import DepthMix
from wakeful.errors import WakefulError
from wakeful.variants.shape import Shape


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
        """Store the options; raise `WakefulError` if one is less than 1."""
        super().__init__()
        if dilation < 1 or period < 1:
            raise WakefulError(
                f"denseformer: dilation and period count from 1, got {dilation} and {period}"
            )
        self.dilation = dilation
        self.period = period

    def attach(self, shape: Shape) -> None:
        """Create the weights of the average after every `period`-th block: at first 1 for the
        block's own output, the last of them, and 0 for earlier hidden states.

        Raises:
            WakefulError: no block is followed by an average, as `period` is longer than the layers.
        """
        super().attach(shape)
        self.weights = nn.ParameterDict()
        for number in range(1, shape.num_layers + 1):
            if number % self.period == 0:
                num_terms = len(self._terms(number)) + 1  # with the block's own output
                start = torch.zeros(num_terms)
                start[-1] = 1.0
                self.weights[str(number)] = nn.Parameter(start)
        if not self.weights:
            raise WakefulError(
                f"denseformer: period {self.period} is longer than the {shape.num_layers} layers"
            )

    @torch.no_grad()
    def start_plain(self) -> str:
        """Set each average to the block's own output, which is the plain stream.

        Return "": nothing differs from a plain model that would have to be reported.
        """
        for weights in self.weights.values():
            weights.zero_()[-1] = 1.0
        return ""

    @torch.no_grad()
    def take_over(self, reference: DepthMix, sources: Sequence[int]) -> None:
        """Copy the trained weights of `reference` for the inherited layers.

        Layer n was layer `sources[n]` there; −1 is a new layer, which keeps its weights.

        Raises:
            WakefulError: the inherited layers are not the first ones here and there, in order.
        """
        assert isinstance(reference, DenseFormer)
        num_inherited = self.first_layers(sources)
        for number, weights in self.weights.items():
            if int(number) <= num_inherited:  # blocks are numbered from 1
                weights.copy_(reference.weights[number])

    def reads(self, number: int) -> frozenset[int]:
        return frozenset() if number % self.period else frozenset(self._terms(number))

    def forward(self, number: int, x: Tensor, hiddens: Mapping[int, Tensor]) -> Tensor:
        """Return the weighted sum of the output `x` of block `number` and earlier hidden states, or
        `x` itself if `number` is no multiple of `period`.

        `hiddens` are the earlier states by number: 0 is the embedding, n the output of block n.
        """
        if number % self.period:  # no average after this block
            return x
        weights = self.weights[str(number)].to(x.dtype).unbind()
        mixed = weights[-1] * x
        for weight, earlier in zip(weights[:-1], self._terms(number), strict=True):
            mixed = mixed + weight * hiddens[earlier]
        return mixed

    def _terms(self, number: int) -> list[int]:
        return [j for j in range(number) if (number - j) % self.dilation == 0]
