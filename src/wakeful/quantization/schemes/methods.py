"""Methods: what is done to a layer before it is rounded, by what calibration text shows of it.

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
"""About this many columns are rounded before their errors are added to the rest at once."""


@dataclass
class InputStatistics:
    """Statistics of calibration text at a layer with K inputs."""

    channels: Tensor
    """(K,), the largest |x| of each input channel."""
    outputs: float
    """The largest |y|."""
    products: Tensor | None
    """(K, K), XᵀX in float32, where it was asked for."""
    readers: "Readers"
    """The layers that read the same tensor."""
    of_norm: bool = True
    """True where the layer reads a norm's output; looked at for a method that asks."""


@dataclass
class Readers:
    """Layers that read one tensor."""

    weights: Tensor
    """(K,), the largest |W| of each input channel over all of them."""


class Method(FieldVariant, ABC):
    """A way to round a layer's weights, and a division of its inputs that they make up for.

    This one itself rounds to nearest and looks at no text.
    """

    needs_products: ClassVar[bool] = False
    """True where `round` asks for XᵀX."""
    # What follows are options of some methods, and these the values of all others.
    weighting = "none"
    """Weights of tokens in XᵀX: "loss" (its sensitivity to their errors) or "none" (equal)."""
    sequential = False
    """True where a block is looked at in the model whose earlier blocks are rounded already."""
    norms = False
    """True where layers that no norm comes before keep their inputs undivided."""

    @property
    def weighs_tokens(self) -> bool:
        """True where `weighting` is by the loss."""
        return self.weighting == "loss"

    def passes(self, sequences: int) -> float:
        """Return how many forwards of the model a sequence of calibration text takes, of so many;
        one forward and back is three, and a large model goes through once more.
        """
        return 3.0 if self.weighs_tokens else 1.0

    @property
    def divides(self) -> bool:
        """True where inputs are divided."""
        return type(self).divisor is not Method.divisor

    def divisor(self, statistics: InputStatistics, grid: Grid) -> Float[Tensor, "K"]:
        """Return what to divide inputs and multiply weights by, of a method that divides."""
        raise NotImplementedError

    def round(
        self, weight: Float[Tensor, "N K"], grid: Grid, products: Float[Tensor, "K K"] | None
    ) -> tuple[Tensor, Scales]:
        """Return the codes of W and their scales, to nearest here; `products` is XᵀX.

        Rows that share no scale are rounded some after others.
        """
        if grid.per == "tensor":
            scales = grid.scales_of(weight)
            return grid.quantize(weight, scales), scales
        parts: list[tuple[Tensor, Scales]] = []
        for part in split_rows(weight):
            rows = to_memory(part)
            scales = grid.scales_of(rows)
            parts.append((grid.quantize(rows, scales), scales))
        integers, scales_of_parts = zip(*parts, strict=True)
        joined = {
            name: torch.cat([getattr(scale, name) for scale in scales_of_parts])
            for name in ("scale", "zero", "outer")
            if getattr(scales_of_parts[0], name) is not None
        }
        return torch.cat(integers), replace(scales_of_parts[0], **joined)

    def round_all(
        self,
        weight: Float[Tensor, "N K"],
        grids: Sequence[Grid],
        products: Float[Tensor, "K K"] | None,
    ) -> list[tuple[Tensor, Scales]]:
        """Return what `round` returns on each grid, in less time where they share work."""
        return [self.round(weight, grid, products) for grid in grids]


class Gptq(Method):
    """GPTQ (2210.17323, algorithm 1): columns are rounded one after another, and each one's error
    is made up for by those after it, as far as the text shows them together.

    H = XᵀX + `damping` · mean(diag XᵀX) · I and H⁻¹ = UᵀU; with e = (w_i − ŵ_i) / U_ii the columns
    j > i become w_j − e·U_ij.

    The columns whose inputs are largest, by diag XᵀX, are rounded first, while the most columns are
    left to make up for them (the authors' code). Groups stay those of neighbors and keep the scales
    of the weights as they were. Without `act_order` columns go by their place, as in the paper, and
    a group's scale is set when its first column's turn comes: what a sequence's first token needs,
    which is seen once in a sequence and read by every query, is then given up for the other tokens.

    With `clip` what shares a scale gives its largest numbers up where that makes the error
    Σ_k h_k (w_k − ŵ_k)² of rounding to nearest smaller, h = diag XᵀX: its range shrinks in steps of
    a fiftieth, to half at most (the authors' code has a like search, unweighted). Without, the
    range holds all numbers, as in the paper.

    With `sequential` a block's inputs are those that the quantized blocks before it give, as in the
    authors' code; without, those of the model in full precision.

    With `weighting` "loss" every token counts by the square of the loss's gradient in the layer's
    output (`wakeful.quantization.weighing`; GuidedQuant, 2505.07004), which takes a backward pass;
    with "none" all count alike, as in the paper.
    """

    examples = (
        "gptq", "gptq(damping=0.05)", "gptq(act_order=False)", "gptq(weighting='none')",
        "gptq(sequential=True)", "gptq(clip=False)", "gptq(act_order=False, clip=False)",
    )  # fmt: skip
    needs_products = True
    damping: float = 0.01
    act_order: bool = True
    weighting: Weighting = "loss"
    sequential: bool = False
    clip: bool = True

    def __post_init__(self) -> None:
        if not self.damping > 0:
            raise WakefulError(f"gptq: damping must be above 0, got {self.damping}")

    def round(
        self, weight: Float[Tensor, "N K"], grid: Grid, products: Float[Tensor, "K K"] | None
    ) -> tuple[Tensor, Scales]:
        return self.round_all(weight, [grid], products)[0]

    def round_all(
        self,
        weight: Float[Tensor, "N K"],
        grids: Sequence[Grid],
        products: Float[Tensor, "K K"] | None,
    ) -> list[tuple[Tensor, Scales]]:
        """Return the codes and scales of each grid; all share U."""
        assert products is not None
        importance = products.diagonal().float()
        order = torch.arange(weight.shape[1], device=weight.device)
        if self.act_order:
            order = products.diagonal().argsort(descending=True, stable=True)
            products = products[order][:, order]
        factor = self.factor(products)
        return [self._rounded(weight, grid, factor, order, importance) for grid in grids]

    def _rounded(
        self, weight: Tensor, grid: Grid, factor: Tensor, order: Tensor, importance: Tensor
    ) -> tuple[Tensor, Scales]:
        # Columns of W are rows here: a column and all that takes over its error lie together.
        w = weight.detach().T.double()[order]
        places, width = order.tolist(), len(w)
        codes = torch.empty(w.shape, dtype=torch.int8, device=w.device)
        scales = grid.scales_of(weight)
        if self.clip:
            scales = shrunk(grid, weight, scales, importance)
        group = grid.group or 1
        step = group * max(1, _COLUMNS // group)
        for first in range(0, width, step):
            last = min(first + step, width)
            block, errors = w[first:last], []
            for column in range(first, last):
                here, channel = column - first, places[column]
                if grid.group and not self.act_order and column % group == 0:
                    rest = block[here : here + group].T
                    fresh = grid.refit(rest, scales)
                    if self.clip:
                        fresh = shrunk(grid, rest, fresh, importance[column : column + group])
                    _put(scales, column // group, fresh)
                numbers = block[here].unsqueeze(1)
                scale = scales.at(channel)
                code = grid.quantize(numbers, scale)
                error = (numbers - grid.dequantize(code, scale)).squeeze(1)
                error /= factor[column, column]
                block[here + 1 :].addr_(factor[column, column + 1 : last], error, alpha=-1)
                codes[channel] = code.squeeze(1)
                errors.append(error)
            w[last:].addmm_(factor[first:last, last:].T, torch.stack(errors), alpha=-1)
        return codes.T.contiguous(), scales

    def factor(self, products: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
        """Return U in float64, upper triangular, of (XᵀX + damping)⁻¹ = UᵀU."""
        hessian = products.double().clone()
        diagonal = hessian.diagonal()
        mean = float(diagonal.mean())
        diagonal += self.damping * mean if mean > 0 else 1.0  # nothing came in: all are alike
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if failed:
            raise WakefulError(f"gptq: damping = {self.damping:g} leaves XᵀX singular: raise it")
        return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)


class Smooth(Method):
    """SmoothQuant (2211.10438, equation 4): input channels are divided by
    s = max|x|^α / max|W|^(1−α), and weights multiplied by it.

    Layers that read the same tensor share s. With `norms` only those divide that read a norm's
    output, whose scale can take s up (as the authors' code does).
    """

    examples = ("smooth", "smooth(alpha=0.75)", "smooth(norms=True)")
    alpha: float = 0.5
    norms: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise WakefulError(f"smooth: alpha must be from 0 to 1, got {self.alpha}")

    def divisor(self, statistics: InputStatistics, grid: Grid) -> Float[Tensor, "K"]:
        inputs, weights = statistics.channels.float(), statistics.readers.weights.float()
        s = inputs**self.alpha / weights ** (1 - self.alpha)
        return torch.where((inputs > 0) & (weights > 0), s, torch.ones_like(s))


def shrunk(
    grid: Grid, weight: Float[Tensor, "N K"], scales: Scales, importance: Float[Tensor, "K"]
) -> Scales:
    """Return the scales of a narrower range of W where it has the smaller Σ_k h_k (w_k − ŵ_k)²."""
    weight = weight.detach().float()
    bounds = grid.bounds(weight)

    def error(scales: Scales) -> Tensor:
        difference = grid.fake_quantize(weight, scales).sub_(weight)
        return grid.shared_sum(difference.square_().mul_(importance))

    best, least_error = scales, error(scales)
    for share in torch.linspace(1, 0.5, 26)[1:].tolist():
        low, high = (share * bound for bound in bounds)
        narrower = grid.scales_between(low, high, scales.outer)
        new_error = error(narrower)
        better = new_error < least_error
        least_error = torch.where(better, new_error, least_error)
        zero = None
        if narrower.zero is not None and best.zero is not None:
            zero = torch.where(better, narrower.zero, best.zero)
        best = replace(best, scale=torch.where(better, narrower.scale, best.scale), zero=zero)
    return best


def _put(scales: Scales, group: int, fresh: Scales) -> None:
    scales.scale[:, group : group + 1] = fresh.scale
    if scales.zero is not None and fresh.zero is not None:
        scales.zero[:, group : group + 1] = fresh.zero
