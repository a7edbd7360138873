"""GPTQ: rounding of a weight column by column; later columns make up for each column's error.

Shapes: N output channels, K input channels, k columns of a group, C scales to try for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.paged import AT_ONCE, to_memory
from wakeful.quantization.schemes.grids import MOST_SCALES, Grid, Scales
from wakeful.quantization.schemes.methods import Method, Weighting

_COLUMNS = 128
"""About this many columns are rounded before their errors are added to all later columns."""


class Gptq(Method):
    """GPTQ (2210.17323, algorithm 1): columns are rounded one after another, and later columns are
    changed to make up for the error of each, as far as inputs are correlated.

    H = XᵀX + `damping` · mean(diag XᵀX) · I and H⁻¹ = UᵀU; with e = (w_i − ŵ_i) / U_ii the columns
    j > i become w_j − e·U_ij. The sum of all e² is tr ΔHΔᵀ with Δ = Ŵ − W, the squared error of the
    layer's outputs and, by the damping, of its weights. The paper's damping is 0.01. The default is
    larger because XᵀX of little text is noisy.

    With `act_order` the columns with the largest inputs, by diag XᵀX, are rounded first, while most
    columns are left to make up for them (the authors' code); in a format with groups, the groups
    with the largest inputs, and in each group its columns with the largest inputs. Without it,
    columns are rounded in their order, as in the paper; that costs a sequence's first token, which
    every query reads, accuracy that other tokens gain. A group's scale is set when its first
    column's turn comes, from weights that make up for earlier errors.

    With `clip` a group's columns are rounded under several scales (`Grid.scales_to_try`), and each
    row keeps the one with the smallest sum of e². In a format without groups, a range of weights
    that share a scale is narrowed where that reduces the error Σ_k h_k (w_k − ŵ_k)² of rounding to
    nearest, h = diag XᵀX: in steps of a fiftieth, to half at most. Without `clip`, the range is
    that of the numbers at the time when the scale is set, as in the paper.

    With `sequential` a block's inputs are those that the quantized blocks before it compute, as in
    the authors' code; without it, those of the full-precision model.

    With `weighting` "loss" every token counts by the squared gradient of the loss in the layer's
    output (`wakeful.quantization.token_weights`; GuidedQuant, 2505.07004), which takes a backward
    pass; with "none" all tokens count equally, as in the paper.
    """

    examples = (
        "gptq", "gptq(damping=0.01)", "gptq(act_order=False)", "gptq(weighting='none')",
        "gptq(sequential=True)", "gptq(clip=False)", "gptq(act_order=False, clip=False)",
    )  # fmt: skip
    needs_gram = True
    damping: float = 0.1
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
        """Return a weight's codes and scales in each of several number formats. Formats with groups
        of one size share the factor U of the inverse Hessian.
        """
        assert gram is not None
        importance = gram.diagonal().float()
        factor = None if self.act_order else self.inverse_hessian_factor(gram)
        rounded: dict[int, tuple[Tensor, Scales]] = {}  # by the format's index
        for group in dict.fromkeys(grid.group for grid in grids):
            parts = self._order_columns(importance, group)
            if self.act_order:  # groups of each size have another order
                order = torch.cat(parts)
                factor = self.inverse_hessian_factor(gram[order][:, order])
            assert factor is not None
            for index, grid in enumerate(grids):
                if grid.group == group:
                    rounded[index] = self._round_columns(weight, grid, parts, factor, importance)
        return [rounded[index] for index in range(len(grids))]

    def _order_columns(self, importance: Float[Tensor, "K"], group: int) -> list[Int[Tensor, "_"]]:
        """Return the indices of columns in the order in which these are rounded, in one part for
        each group; with `group` 0, in parts of any size.
        """
        columns = torch.arange(len(importance), device=importance.device)
        if not group:
            if self.act_order:
                columns = importance.argsort(descending=True, stable=True)
            return list(columns.split(_COLUMNS))
        groups = list(columns.split(group))
        if not self.act_order:
            return groups
        sums = torch.stack([importance[columns].sum() for columns in groups])
        by_importance = sums.argsort(descending=True, stable=True).tolist()
        return [
            columns[importance[columns].argsort(descending=True, stable=True)]
            for columns in (groups[index] for index in by_importance)
        ]

    def _round_columns(
        self, weight: Tensor, grid: Grid, parts: list[Tensor], factor: Tensor, importance: Tensor
    ) -> tuple[Tensor, Scales]:
        """Round the columns of W (N, K) one after another and return codes (N, K) and scales.

        `parts` are the columns' indices in the order of `factor`, U (K, K): a part for each group.
        `importance` (K,), the diagonal of XᵀX, has the order of W. Rows do not depend on each
        other: some are rounded at a time, to save memory.
        """
        whole = self._fit_scales(weight, grid, importance) if grid.per == "tensor" else None
        num_copies = MOST_SCALES if self.clip and grid.group else 1
        numbers_of_row = max(weight.shape[1], num_copies * max(map(len, parts)))
        codes: list[Tensor] = []
        scales_by_slice: list[Scales] = []
        for stored_rows in weight.split(max(1, AT_ONCE // numbers_of_row)):
            rows = to_memory(stored_rows.detach())  # from a file that the weight may be in
            scales = self._fit_scales(rows, grid, importance) if whole is None else whole
            row_codes, scales = self._round_rows(rows, grid, parts, factor, scales)
            codes.append(row_codes)
            scales_by_slice.append(scales)
        if grid.per == "tensor" and not grid.group:
            return torch.cat(codes), scales_by_slice[0]
        return torch.cat(codes), grid.join_rows(scales_by_slice)

    def _fit_scales(self, weight: Tensor, grid: Grid, importance: Tensor) -> Scales:
        """Return the scales of a weight. In a format with groups only its outer scale is used: each
        group's scale is set as the group is rounded.
        """
        scales = grid.compute_scales(weight)
        if self.clip and not grid.group:
            scales = shrink_range(grid, weight, scales, importance)
        return scales

    def _round_rows(
        self, weight: Tensor, grid: Grid, parts: list[Tensor], factor: Tensor, scales: Scales
    ) -> tuple[Tensor, Scales]:
        """Return codes (N, K) and scales of some rows W (N, K) of a weight.

        A part's errors are added at once to the columns of its block, about `_COLUMNS` of them, and
        to all later columns at the block's end.
        """
        order = torch.cat(parts)
        # W's columns, in their order, are the rows of w: a column's numbers lie together in memory.
        w = weight.T[order].double()
        codes = torch.empty(w.shape, dtype=torch.int8, device=w.device)
        group_scales: list[Scales] = []
        for first, last, block in _blocks(parts):
            errors = torch.empty_like(w[first:last])
            start = first
            for columns in block:
                stop = start + len(columns)
                part = w[start:stop]
                candidates = [scales]
                if grid.group and self.clip:
                    candidates = grid.scales_to_try(part.T, scales.outer)
                elif grid.group:
                    whole = grid.compute_scales(part.T, outer=scales.outer)
                    candidates = [replace(whole, group=0)]
                levels, part_errors, part_scales = _round_part(
                    part, grid, candidates, factor[start:stop, start:stop]
                )
                w[stop:last].addmm_(factor[start:stop, stop:last].T, part_errors, alpha=-1)
                errors[start - first : stop - first] = part_errors
                codes[columns] = grid.encode(levels)
                group_scales.append(part_scales)
                start = stop
            w[last:].addmm_(factor[first:last, last:].T, errors, alpha=-1)
        if grid.group:
            sequence = (torch.stack([columns[0] for columns in parts]) // grid.group).argsort()
            joined = {
                name: torch.cat([getattr(each, name) for each in group_scales], 1)[:, sequence]
                for name in _names(scales)
            }
            scales = replace(scales, **joined)
        return codes.T.contiguous(), scales

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


def _blocks(parts: Sequence[Tensor]) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Yield parts of columns in blocks of about `_COLUMNS` columns: the numbers of columns before
    the block and up to its end, and its parts.
    """
    first, size, block = 0, 0, list[Tensor]()
    for part in parts:
        if block and size + len(part) > _COLUMNS:
            yield first, first + size, block
            first, size, block = first + size, 0, []
        block.append(part)
        size += len(part)
    if block:
        yield first, first + size, block


def _round_part(
    w: Float[Tensor, "k N"], grid: Grid, candidates: Sequence[Scales], factor: Float[Tensor, "k k"]
) -> tuple[Tensor, Tensor, Scales]:
    """Round columns, here the rows of w, one after another under each of several scales; return the
    numbers q (k, N), the errors e (k, N) and the scales, for each row of the weight those with the
    smallest sum of e².

    `factor` is the part of U for these columns. `candidates` are scales without groups.
    """
    num_rows, num_candidates = w.shape[1], len(candidates)
    scales = candidates[0]
    if num_candidates > 1:  # N rows under the first candidate, then N under the second ...
        scales = replace(scales.repeat(num_candidates), **_join(candidates))
    w = w.repeat(1, num_candidates)
    levels = torch.empty(w.shape, dtype=torch.float32, device=w.device)
    errors = torch.empty_like(w)
    for column in range(len(w)):
        numbers = w[column].unsqueeze(1)
        q = grid.round_to_levels(numbers, scales)
        levels[column] = q.squeeze(1)
        error = (numbers - grid.rescale(q, scales)).squeeze(1) / factor[column, column]
        errors[column] = error
        w[column + 1 :].addr_(factor[column, column + 1 :], error, alpha=-1)
    if num_candidates == 1:
        return levels, errors, scales
    loss = errors.square().sum(0).view(num_candidates, num_rows)
    loss = loss.nan_to_num(nan=torch.inf)  # a scale may be beyond what its dtype holds
    best = loss.argmin(0) * num_rows + torch.arange(num_rows, device=w.device)
    chosen = {name: tensor[best] for name, tensor in _join(candidates).items()}
    return levels[:, best], errors[:, best], replace(candidates[0], **chosen)


def _join(candidates: Sequence[Scales]) -> dict[str, Tensor]:
    """Return the scales of all candidates as one tensor, (C N, 1), and their zero points, if any,
    by name.
    """
    return {
        name: torch.cat([getattr(candidate, name) for candidate in candidates])
        for name in _names(candidates[0])
    }


def _names(scales: Scales) -> list[str]:
    """Return the names of the tensors that each group has of its own."""
    return ["scale"] if scales.zero is None else ["scale", "zero"]


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
