"""Methods: ways to round a layer's weights, by statistics of calibration text.

Shapes: N output channels, K input channels.
"""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.paged import split_rows, to_memory
from wakeful.quantization.schemes.grids import Grid, Scales
from wakeful.variants import FieldVariant

Weighting = Literal["loss", "none"]
_COLUMNS = 128
"""About this many columns are rounded before their errors are added to all later columns."""


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
        joined = {
            name: torch.cat([getattr(scales, name) for scales in scales_by_slice])
            for name in ("scale", "zero", "outer")
            if getattr(scales_by_slice[0], name) is not None
        }
        return torch.cat(codes), replace(scales_by_slice[0], **joined)

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


class Gptq(Method):
    """GPTQ (2210.17323, algorithm 1): columns are rounded one after another, and later columns are
    changed to make up for the error of each, as far as inputs are correlated.

    H = XᵀX + `damping` · mean(diag XᵀX) · I and H⁻¹ = UᵀU; with e = (w_i − ŵ_i) / U_ii the columns
    j > i become w_j − e·U_ij.

    With `act_order` the columns with the largest inputs, by diag XᵀX, are rounded first, while most
    columns are left to make up for them (the authors' code). Groups are still of neighboring
    columns, and their scales are those of the original weights. Without it, columns are rounded in
    their order, as in the paper, and a group's scale is set when its first column's turn comes;
    that costs a sequence's first token, which every query reads, accuracy that other tokens gain.

    With `clip` a range of weights that share a scale is narrowed where that reduces the error
    Σ_k h_k (w_k − ŵ_k)² of rounding to nearest, h = diag XᵀX: in steps of a fiftieth, to half at
    most (the authors' code has a similar search, unweighted). Without it, the range holds all
    numbers, as in the paper.

    With `sequential` a block's inputs are those that the quantized blocks before it compute, as in
    the authors' code; without it, those of the full-precision model.

    With `weighting` "loss" every token counts by the squared gradient of the loss in the layer's
    output (`wakeful.quantization.token_weights`; GuidedQuant, 2505.07004), which takes a backward
    pass; with "none" all tokens count equally, as in the paper.
    """

    examples = (
        "gptq", "gptq(damping=0.05)", "gptq(act_order=False)", "gptq(weighting='none')",
        "gptq(sequential=True)", "gptq(clip=False)", "gptq(act_order=False, clip=False)",
    )  # fmt: skip
    needs_gram = True
    damping: float = 0.01
    act_order: bool = True
    weighting: Weighting = "loss"
    sequential: bool = False
    clip: bool = True

    def __post_init__(self) -> None:
        if not self.damping > 0:
            raise WakefulError(f"gptq: damping must be above 0, got {self.damping}")

    def round_weight(
        self, weight: Float[Tensor, "N K"], grid: Grid, gram: Float[Tensor, "K K"] | None
    ) -> tuple[Tensor, Scales]:
        return self.round_with_grids(weight, [grid], gram)[0]

    def round_with_grids(
        self,
        weight: Float[Tensor, "N K"],
        grids: Sequence[Grid],
        gram: Float[Tensor, "K K"] | None,
    ) -> list[tuple[Tensor, Scales]]:
        """Return a weight's codes and scales in each of several number formats, which share the
        factor U of the inverse Hessian.
        """
        assert gram is not None
        importance = gram.diagonal().float()
        order = torch.arange(weight.shape[1], device=weight.device)
        if self.act_order:  # the largest inputs first
            order = gram.diagonal().argsort(descending=True, stable=True)
            gram = gram[order][:, order]
        factor = self.inverse_hessian_factor(gram)
        return [self._round_columns(weight, grid, factor, order, importance) for grid in grids]

    def _round_columns(
        self, weight: Tensor, grid: Grid, factor: Tensor, order: Tensor, importance: Tensor
    ) -> tuple[Tensor, Scales]:
        """Round the columns of W (N, K) one after another and return codes (N, K) and scales.

        Columns are rounded in `order`, which is also the order of the rows and columns of `factor`,
        U (K, K). `importance` (K,), the diagonal of XᵀX, has the order of W. Each column's error is
        added to later columns: at once within its block of columns, at the block's end beyond it.
        """
        # W's columns, in `order`, are the rows of w: a column's numbers lie together in memory.
        w = weight.detach().T.double()[order]
        channels, width = order.tolist(), len(w)
        codes = torch.empty(w.shape, dtype=torch.int8, device=w.device)
        scales = grid.compute_scales(weight)
        if self.clip:
            scales = shrink_range(grid, weight, scales, importance)
        group = grid.group or 1
        block_size = group * max(1, _COLUMNS // group)  # whole groups
        for first in range(0, width, block_size):
            last = min(first + block_size, width)
            block, errors = w[first:last], []
            for column in range(first, last):
                # The column's place in the block, and its place in W.
                row, channel = column - first, channels[column]
                # Without `act_order` a group's scale is computed when its first column's turn
                # comes, from weights that make up for earlier errors.
                if grid.group and not self.act_order and column % group == 0:
                    group_importance = importance[column : column + group]
                    self._rescale_group(
                        grid, scales, column // group, block[row : row + group].T, group_importance
                    )
                numbers = block[row].unsqueeze(1)
                scale = scales.for_channel(channel)
                code = grid.quantize(numbers, scale)
                error = (numbers - grid.dequantize(code, scale)).squeeze(1)
                error /= factor[column, column]
                block[row + 1 :].addr_(factor[column, column + 1 : last], error, alpha=-1)
                codes[channel] = code.squeeze(1)
                errors.append(error)
            w[last:].addmm_(factor[first:last, last:].T, torch.stack(errors), alpha=-1)
        return codes.T.contiguous(), scales

    def _rescale_group(
        self, grid: Grid, scales: Scales, group_index: int, weight: Tensor, importance: Tensor
    ) -> None:
        """Replace the scales of the group of columns `group_index` in `scales`, in place, by those
        of its current weights (N, k), whose columns have this `importance` (k,).
        """
        group_scales = grid.compute_scales(weight, outer=scales.outer)
        if self.clip:
            group_scales = shrink_range(grid, weight, group_scales, importance)
        column = slice(group_index, group_index + 1)
        scales.scale[:, column] = group_scales.scale
        if scales.zero is not None and group_scales.zero is not None:
            scales.zero[:, column] = group_scales.zero

    def inverse_hessian_factor(self, gram: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
        """Return U in float64, upper triangular, with (XᵀX + damping)⁻¹ = UᵀU; `gram` is XᵀX.

        Raises:
            WakefulError: the damping is too small for XᵀX to have a Cholesky factor.
        """
        hessian = gram.to(torch.float64, copy=True)
        diagonal = hessian.diagonal()  # a view: adding to it changes the Hessian
        mean = float(diagonal.mean())
        diagonal += self.damping * mean if mean > 0 else 1.0  # 1 if all inputs were zero
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if failed:
            raise WakefulError(f"gptq: damping = {self.damping:g} leaves XᵀX singular: raise it")
        inverse = torch.cholesky_inverse(lower, out=hessian)  # in the Hessian's memory
        return torch.linalg.cholesky(inverse, upper=True)


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


def shrink_range(
    grid: Grid, weight: Float[Tensor, "N K"], scales: Scales, importance: Float[Tensor, "K"]
) -> Scales:
    """Return `scales`, each replaced by the scale of a narrower range if that has a smaller error.

    The error Σ_k h_k (w_k − ŵ_k)², with h = `importance` of input channels, is summed over the
    weights that share a scale. Ranges from 98% to 50% of the full one are tried.
    """
    weight = weight.detach().float()
    smallest, largest = grid.value_range(weight)

    def rounding_error(scales: Scales) -> Tensor:
        difference = grid.fake_quantize(weight, scales).sub_(weight)
        return grid.sum_per_scale(difference.square_().mul_(importance))

    best, least_error = scales, rounding_error(scales)
    for share in torch.linspace(1, 0.5, 26)[1:].tolist():
        narrower = grid.fit_group_scales(share * smallest, share * largest, scales.outer)
        new_error = rounding_error(narrower)
        better = new_error < least_error
        least_error = torch.where(better, new_error, least_error)
        scale = torch.where(better, narrower.scale, best.scale)
        zero = None
        if narrower.zero is not None and best.zero is not None:
            zero = torch.where(better, narrower.zero, best.zero)
        best = replace(best, scale=scale, zero=zero)
    return best
