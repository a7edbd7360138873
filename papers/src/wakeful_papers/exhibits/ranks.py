"""Ranks of a comparison's variants by a table's columns, and Pareto fronts of loss and figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from wakeful.estimates import Estimate, interval_half_width, mean_and_error
from wakeful.training.compared import ComparedRuns, TrainedRun
from wakeful.training.tables import paired_difference
from wakeful_papers.exhibits.figures import validation_curve
from wakeful_papers.exhibits.filled import fill_rows, is_significant, seed_differences, seed_values
from wakeful_papers.exhibits.table import Column, PublishedTable

LOSS = "loss"
"""The figure that fronts set all others against, and its group."""
COST = "cost"
"""The group of figures in which variants differ by construction."""

Figures = Mapping[tuple[str, str], Mapping[int, float]]
"""By figure and variant, its value for each seed."""


@dataclass(frozen=True)
class RankedVariant:
    """A variant's ranks, 1 the best."""

    variant: str
    groups: Mapping[str, float]
    """The mean over seeds of its mean rank in a group's columns, for groups that were measured."""
    overall: Estimate
    """The mean of its groups' ranks, over seeds."""
    half_width: float
    """Half the width of the 95% interval of `overall`; infinite for one seed."""
    difference: Estimate
    """Its final loss minus the baseline's."""
    same_time: Estimate | None
    """That after equal training time; None if it is unknown (`equal_time_differences`)."""


@dataclass(frozen=True)
class Front:
    """Each variant's loss against another figure, as means over seeds."""

    column: Column
    points: pl.DataFrame
    """variant, x, x_error, loss, loss_error, and `front`: True if no other variant is at least as
    good in both and better in one."""


@dataclass(frozen=True)
class Ranking:
    """All of a comparison's variants, ranked."""

    groups: tuple[str, ...]
    rows: tuple[RankedVariant, ...]
    """Best first."""
    fronts: tuple[Front, ...]
    seeds: tuple[int, ...]
    """Seeds that every variant has finished; only these are ranked."""
    num_columns: int
    """Columns in which variants could be separated from the baseline: all but costs."""
    inseparable: tuple[str, ...]
    """Variants that no 95% interval separates from the baseline in any of those columns."""


def rank_variants(comparison: ComparedRuns, table: PublishedTable) -> Ranking | None:
    """Return the ranks of variants by a table's columns that have a better direction.

    For each seed, variants are ranked in each column, 1 the best, and ties share the mean of their
    ranks. A group's rank is the mean over its columns, the overall rank the mean over the groups;
    of both the mean over seeds is returned, and of the overall rank an interval too.

    None for a single variant, without a better direction, or if all have no seed in common.
    """
    columns, seeds = _ranked_columns(comparison, table), _common_seeds(comparison)
    return _ranking(comparison, columns, seeds) if columns and seeds else None


def has_no_common_seed(comparison: ComparedRuns, table: PublishedTable) -> bool:
    """Return True if variants could be ranked but have no finished seed in common."""
    return bool(_ranked_columns(comparison, table)) and not _common_seeds(comparison)


def _ranked_columns(comparison: ComparedRuns, table: PublishedTable) -> list[Column]:
    """Return a table's columns with a better direction; none if there is only one variant."""
    if len(comparison.variants) < 2:
        return []
    return [column for column in fill_rows(comparison, table).columns if column.better]


def _common_seeds(comparison: ComparedRuns) -> tuple[int, ...]:
    finished = [{run.seed for run in comparison.of(name)} for name in comparison.variants]
    return tuple(sorted(set.intersection(*finished)))


def _ranking(
    comparison: ComparedRuns, columns: Sequence[Column], seeds: tuple[int, ...]
) -> Ranking:
    figures = {
        (column.figure, variant): seed_values(comparison, variant, column.figure)
        for column in columns
        for variant in comparison.variants
    }
    timed = equal_time_differences(comparison)
    ranks = _ranks(columns, figures, seeds)
    rows: list[RankedVariant] = []
    for variant in comparison.variants:
        variant_ranks = ranks.filter(variant=variant)
        seed_means = _means(variant_ranks, "seed")
        overall = mean_and_error([seed_means.get(seed, math.nan) for seed in seeds])
        rows.append(RankedVariant(
            variant=variant, groups=_means(variant_ranks, "group"), overall=overall,
            half_width=interval_half_width(overall[1], len(seeds)),
            difference=paired_difference(comparison, variant), same_time=timed.get(variant),
        ))  # fmt: skip
    fronts = (
        _front(comparison, column, figures, seeds)
        for column in columns
        if column.front and (LOSS, comparison.baseline) in figures
    )
    names = [column.figure for column in columns if column.group != COST]

    def is_separable(variant: str) -> bool:
        pairs = ((figures[name, variant], figures[name, comparison.baseline]) for name in names)
        return variant == comparison.baseline or any(
            is_significant(seed_differences(*pair)) for pair in pairs
        )

    return Ranking(
        groups=tuple(dict.fromkeys(column.group for column in columns)),
        rows=tuple(sorted(rows, key=lambda row: row.overall[0])),
        fronts=tuple(front for front in fronts if front is not None),
        seeds=seeds,
        num_columns=len(names),
        inseparable=tuple(name for name in comparison.variants if not is_separable(name)),
    )


def _ranks(columns: Sequence[Column], figures: Figures, seeds: Sequence[int]) -> pl.DataFrame:
    """Return the mean rank in each group of columns, with one row per variant, seed and group."""
    schema = {"figure": pl.String, "group": pl.String, "variant": pl.String, "seed": pl.Int64,
              "value": pl.Float64}  # fmt: skip
    rows = [
        (column.figure, column.group, variant, seed, -value if column.better == "higher" else value)
        for column in columns
        for (name, variant), values in figures.items()
        if name == column.figure
        for seed, value in values.items()
        if seed in seeds
    ]
    rank = pl.col("value").rank("average").over("figure", "seed")
    ranked = pl.DataFrame(rows, schema=schema, orient="row").with_columns(rank=rank)
    keys = ["variant", "seed", "group"]
    return ranked.group_by(keys, maintain_order=True).agg(pl.col("rank").mean())


def _means(ranks: pl.DataFrame, over: str) -> dict[Any, float]:
    """Return the mean rank by the column `over`: of each group over seeds, or of each seed."""
    means = ranks.group_by(over, maintain_order=True).agg(pl.col("rank").mean())
    return dict(means.select(over, "rank").iter_rows())


def _front(
    comparison: ComparedRuns, column: Column, figures: Figures, seeds: Sequence[int]
) -> Front | None:
    """Return loss against a column, without variants that lack either for a seed; None for none."""
    points: list[tuple[str | float, ...]] = []
    for variant in comparison.variants:
        pair = figures[column.figure, variant], figures[LOSS, variant]
        if all(seed in values for values in pair for seed in seeds):
            x, loss = (mean_and_error([values[seed] for seed in seeds]) for values in pair)
            points.append((variant, *x, *loss))
    if not points:
        return None
    names = ["variant", "x", "x_error", LOSS, f"{LOSS}_error"]
    frame = pl.DataFrame(points, schema=names, orient="row")
    better = frame["x"] if column.better == "lower" else -frame["x"]
    front = find_pareto_front(better.to_list(), frame[LOSS].to_list())
    return Front(column, frame.with_columns(front=pl.Series(front)))


def find_pareto_front(first: Sequence[float], second: Sequence[float]) -> list[bool]:
    """Return for each point True if no other is at most as large in both and smaller in one."""
    points = list(zip(first, second, strict=True))
    return [
        not any(x <= point[0] and y <= point[1] and (x, y) != point for x, y in points)
        for point in points
    ]


def equal_time_differences(comparison: ComparedRuns) -> dict[str, Estimate]:
    """Return each variant's validation loss minus the baseline's after the same training time.

    For each pair the time is that of the faster run's end, by each run's median duration of a step.
    The slower run's loss is interpolated linearly between two evaluations; its learning rate is
    still higher then. The result is the mean over seeds and its error, without variants with a run
    that has no evaluations before and after that time.
    """
    differences: dict[str, Estimate] = {}
    for variant in comparison.variants:
        pairs = comparison.pairs(variant)
        measured = [
            d for run, base in pairs if (d := _equal_time_difference(run, base)) is not None
        ]
        if measured and len(measured) == len(pairs):
            differences[variant] = mean_and_error(measured)
    return differences


def _equal_time_difference(run: TrainedRun, base: TrainedRun) -> float | None:
    if min(run.summary.tokens_per_second, base.summary.tokens_per_second) <= 0:
        return None
    time = min(_training_time(run), _training_time(base))
    loss, base_loss = _loss_at(run, time), _loss_at(base, time)
    return None if loss is None or base_loss is None else loss - base_loss


def _training_time(run: TrainedRun) -> float:
    return run.summary.tokens / run.summary.tokens_per_second


def _loss_at(run: TrainedRun, time: float) -> float | None:
    """Return the validation loss after so many seconds; None outside the evaluated steps."""
    steps, losses = validation_curve(run)
    # To a millionth of a step, so that a run's own time is that of its last evaluation.
    step = round(time / _training_time(run) * run.summary.steps, 6)
    if not len(steps) or not steps[0] <= step <= steps[-1]:
        return None
    return float(np.interp(step, steps, losses))
