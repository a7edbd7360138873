"""A comparison's variants ranked by a table's columns, and the fronts of loss against each."""

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
from wakeful_papers.exhibits.filled import as_trained, by_seed, paired, separated
from wakeful_papers.exhibits.table import Column, PublishedTable

LOSS = "loss"
"""The figure, and the group, that all others are set against."""
COST = "cost"
"""The group in which rows differ because they are built to."""

Figures = Mapping[tuple[str, str], Mapping[int, float]]
"""By figure and variant, its value of each seed."""


@dataclass(frozen=True)
class Ranked:
    """A variant's ranks, 1 the best."""

    variant: str
    groups: Mapping[str, float]
    """The mean over seeds of its mean rank in a group's columns; none of what was not measured."""
    overall: Estimate
    """The mean of its groups' ranks, over seeds."""
    reach: float
    """How far the 95% interval of `overall` goes to either side; infinite for one seed."""
    difference: Estimate
    """Its final loss minus the baseline's."""
    same_time: Estimate | None
    """That after the same time (`equal_time`); None where it cannot be read."""


@dataclass(frozen=True)
class Front:
    """Each variant's loss against another figure: the means over seeds."""

    column: Column
    points: pl.DataFrame
    """variant, x, x_error, loss, loss_error, and whether it is on the front: no other variant is at
    least as good in both and better in one."""


@dataclass(frozen=True)
class Ranking:
    """All of a comparison's variants, ranked."""

    groups: tuple[str, ...]
    rows: tuple[Ranked, ...]
    """The best first."""
    fronts: tuple[Front, ...]
    seeds: tuple[int, ...]
    """Those that every variant has finished; nothing else is ranked."""
    num_columns: int
    """Columns in which variants could be separated from the baseline: all but costs."""
    inseparable: tuple[str, ...]
    """Variants that no 95% interval separates from the baseline in any of those columns."""


def ranking_of(comparison: ComparedRuns, table: PublishedTable) -> Ranking | None:
    """Return the ranks by a table's columns that say which way is better.

    In each seed, variants are ranked in each column, 1 the best, and those that are equal share the
    mean of their ranks. A group's rank is the mean of its columns', the overall rank the mean of
    the groups'; over seeds they have a mean and an interval.

    None where the table ranks nothing, or no seed is finished by all variants.
    """
    columns, seeds = _ranked_columns(comparison, table), _common_seeds(comparison)
    return _ranking(comparison, columns, seeds) if columns and seeds else None


def lacks_common_seed(comparison: ComparedRuns, table: PublishedTable) -> bool:
    """Return whether there would be ranks if the variants had a finished seed in common."""
    return bool(_ranked_columns(comparison, table)) and not _common_seeds(comparison)


def _ranked_columns(comparison: ComparedRuns, table: PublishedTable) -> list[Column]:
    """Return a table's columns that have a better side; none of one variant."""
    if len(comparison.variants) < 2:
        return []
    return [column for column in as_trained(comparison, table).columns if column.better]


def _common_seeds(comparison: ComparedRuns) -> tuple[int, ...]:
    finished = [{run.seed for run in comparison.of(name)} for name in comparison.variants]
    return tuple(sorted(set.intersection(*finished)))


def _ranking(
    comparison: ComparedRuns, columns: Sequence[Column], seeds: tuple[int, ...]
) -> Ranking:
    figures = {
        (column.figure, variant): by_seed(comparison, variant, column.figure)
        for column in columns
        for variant in comparison.variants
    }
    timed = equal_time(comparison)
    ranks = _ranks(columns, figures, seeds)
    rows: list[Ranked] = []
    for variant in comparison.variants:
        mine = ranks.filter(variant=variant)
        each = _means(mine, "seed")
        overall = mean_and_error([each.get(seed, math.nan) for seed in seeds])
        rows.append(Ranked(
            variant=variant, groups=_means(mine, "group"), overall=overall,
            reach=interval_half_width(overall[1], len(seeds)),
            difference=paired_difference(comparison, variant), same_time=timed.get(variant),
        ))  # fmt: skip
    fronts = (
        _front(comparison, column, figures, seeds)
        for column in columns
        if column.front and (LOSS, comparison.baseline) in figures
    )
    names = [column.figure for column in columns if column.group != COST]

    def is_apart(variant: str) -> bool:
        both = ((figures[name, variant], figures[name, comparison.baseline]) for name in names)
        return variant == comparison.baseline or any(separated(paired(*each)) for each in both)

    return Ranking(
        groups=tuple(dict.fromkeys(column.group for column in columns)),
        rows=tuple(sorted(rows, key=lambda row: row.overall[0])),
        fronts=tuple(front for front in fronts if front is not None),
        seeds=seeds,
        num_columns=len(names),
        inseparable=tuple(each for each in comparison.variants if not is_apart(each)),
    )


def _ranks(columns: Sequence[Column], figures: Figures, seeds: Sequence[int]) -> pl.DataFrame:
    """Return the mean rank in each group of columns, a row a variant and seed that has any."""
    schema = {"figure": pl.String, "group": pl.String, "variant": pl.String, "seed": pl.Int64,
              "value": pl.Float64}  # fmt: skip
    rows = [
        (column.figure, column.group, variant, seed, -value if column.better == "higher" else value)
        for column in columns
        for (name, variant), found in figures.items()
        if name == column.figure
        for seed, value in found.items()
        if seed in seeds
    ]
    rank = pl.col("value").rank("average").over("figure", "seed")
    ranked = pl.DataFrame(rows, schema=schema, orient="row").with_columns(rank=rank)
    place = ["variant", "seed", "group"]
    return ranked.group_by(place, maintain_order=True).agg(pl.col("rank").mean())


def _means(ranks: pl.DataFrame, over: str) -> dict[Any, float]:
    """Return the mean rank of each group, over seeds, or of each seed, over groups."""
    means = ranks.group_by(over, maintain_order=True).agg(pl.col("rank").mean())
    return dict(means.select(over, "rank").iter_rows())


def _front(
    comparison: ComparedRuns, column: Column, figures: Figures, seeds: Sequence[int]
) -> Front | None:
    """Return loss against a column; None where no variant has its figure with all the seeds."""
    points: list[tuple[str | float, ...]] = []
    for variant in comparison.variants:
        both = figures[column.figure, variant], figures[LOSS, variant]
        if all(seed in each for each in both for seed in seeds):
            x, loss = (mean_and_error([each[seed] for seed in seeds]) for each in both)
            points.append((variant, *x, *loss))
    if not points:
        return None
    names = ["variant", "x", "x_error", LOSS, f"{LOSS}_error"]
    frame = pl.DataFrame(points, schema=names, orient="row")
    better = frame["x"] if column.better == "lower" else -frame["x"]
    front = undominated(better.to_list(), frame[LOSS].to_list())
    return Front(column, frame.with_columns(front=pl.Series(front)))


def undominated(first: Sequence[float], second: Sequence[float]) -> list[bool]:
    """Return, of each point, whether no other is at most as large in both and smaller in one."""
    points = list(zip(first, second, strict=True))
    return [
        not any(x <= ours[0] and y <= ours[1] and (x, y) != ours for x, y in points)
        for ours in points
    ]


def equal_time(comparison: ComparedRuns) -> dict[str, Estimate]:
    """Return each variant's validation loss minus the baseline's after the same training time.

    Of each pair, the time is that at which the faster of the two ends, in steps of each run's
    median length; the slower one's loss is read off its curve, in a straight line between two
    evaluations. Its learning rate is still higher then. The mean over seeds and its
    error; without those whose curve has no two evaluations about that time.
    """
    found: dict[str, Estimate] = {}
    for variant in comparison.variants:
        pairs = comparison.pairs(variant)
        gaps = [gap for run, base in pairs if (gap := _gap_at_equal_time(run, base)) is not None]
        if gaps and len(gaps) == len(pairs):
            found[variant] = mean_and_error(gaps)
    return found


def _gap_at_equal_time(run: TrainedRun, base: TrainedRun) -> float | None:
    if min(run.summary.tokens_per_second, base.summary.tokens_per_second) <= 0:
        return None
    time = min(_training_time(run), _training_time(base))
    ours, theirs = _loss_at(run, time), _loss_at(base, time)
    return None if ours is None or theirs is None else ours - theirs


def _training_time(run: TrainedRun) -> float:
    return run.summary.tokens / run.summary.tokens_per_second


def _loss_at(run: TrainedRun, time: float) -> float | None:
    """Return the validation loss after that many seconds of training; None before an evaluation."""
    steps, losses = validation_curve(run)
    # To a millionth of a step, so that a run's own time is that of its last evaluation.
    step = round(time / _training_time(run) * run.summary.steps, 6)
    if not len(steps) or not steps[0] <= step <= steps[-1]:
        return None
    return float(np.interp(step, steps, losses))
