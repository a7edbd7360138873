"""Methods: ways to round a layer's weights, by statistics of calibration text.

Shapes: N output channels, K input channels.
"""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.paged import split_rows, to_memory
from wakeful.quantization.schemes.grids import Grid, Scales
from wakeful.variants import FieldVariant

Weighting = Literal["loss", "none"]


@dataclass
class InputStatistics:
    """Statistics of calibration text at a linear layer with K inputs."""

    channel_max: Tensor
    """(K,), the largest |x| of each input channel."""
    output_max: float
    """The largest |y|."""
    gram: Tensor | None
    """(K, K), XᵀX of the inputs in float32, where a method needs it."""
    weight_max: Tensor
    """(K,), the largest |W| of each input channel over all layers that multiply the same input."""
    reads_norm: bool = True
    """True where the layer reads a norm's output, for methods that depend on it."""


class Method(FieldVariant, ABC):
    """A way to round a layer's weights, which may also divide the layer's inputs and multiply its
    weights.

    This base class rounds to nearest and needs no calibration text.
    """

    needs_gram: ClassVar[bool] = False
    """True where `round_weight` needs XᵀX."""
    # Options of some methods, with their values for all other methods.
    weighting = "none"
    """Weights of tokens in XᵀX: "loss" (sensitivity of the loss) or "none" (equal)."""
    sequential = False
    """True where statistics are of the model whose earlier blocks are quantized already."""
    norms = False
    """True where only the inputs of layers that read a norm's output are divided."""

    @property
    def divides_inputs(self) -> bool:
        """True where the method divides a layer's inputs."""
        return type(self).compute_divisor is not Method.compute_divisor

    def compute_divisor(self, statistics: InputStatistics, grid: Grid) -> Float[Tensor, "K"]:
        """Return the divisor (K,) of a layer's inputs, by which its weights are multiplied."""
        raise NotImplementedError

    def round_weight(
        self, weight: Float[Tensor, "N K"], grid: Grid, gram: Float[Tensor, "K K"] | None
    ) -> tuple[Tensor, Scales]:
        """Return a weight's codes (N, K) and scales in a number format; `gram` is XᵀX, where
        `needs_gram`.

        This base class rounds to nearest, a slice of rows at a time unless all share a scale.
        """
        if grid.per == "tensor":
            scales = grid.compute_scales(weight)
            return grid.quantize(weight, scales), scales
        codes: list[Tensor] = []
        scales_by_slice: list[Scales] = []
        for stored_rows in split_rows(weight):
            rows = to_memory(stored_rows)  # from a file that the weight may be in
            scales = grid.compute_scales(rows)
            codes.append(grid.quantize(rows, scales))
            scales_by_slice.append(scales)
        return torch.cat(codes), grid.join_rows(scales_by_slice)

    def round_with_grids(
        self,
        weight: Float[Tensor, "N K"],
        grids: Sequence[Grid],
        gram: Float[Tensor, "K K"] | None,
    ) -> list[tuple[Tensor, Scales]]:
        """Return a weight's codes and scales in each of several number formats, sharing work
        between them.
        """
        return [self.round_weight(weight, grid, gram) for grid in grids]


class Smooth(Method):
    """SmoothQuant (2211.10438, equation 4): input channels are divided by
    s = max|x|^α / max|W|^(1−α), and weights multiplied by it.

    Layers with the same input share s. With `norms` only layers that read a norm's output divide
    it, because the norm's scale can absorb s (as in the authors' code).
    """

    examples = ("smooth", "smooth(alpha=0.75)", "smooth(norms=True)")
    alpha: float = 0.5
    norms: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise WakefulError(f"smooth: alpha must be from 0 to 1, got {self.alpha}")

    def compute_divisor(self, statistics: InputStatistics, grid: Grid) -> Float[Tensor, "K"]:
        """Return s = max|x|^α / max|W|^(1−α) per input channel, 1 where one of the two is zero."""
        input_max = statistics.channel_max.float()
        weight_max = statistics.weight_max.float()
        s = input_max**self.alpha / weight_max ** (1 - self.alpha)
        return torch.where((input_max > 0) & (weight_max > 0), s, torch.ones_like(s))
