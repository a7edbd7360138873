"""A comparison's variants ranked by a table's columns, and the fronts of loss against each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import polars as pl

from wakeful.comparison.paper_table import as_trained, by_seed, paired, separated
from wakeful.comparison.published import Column, PublishedTable
from wakeful.comparison.reading import Comparison
from wakeful.comparison.tables import equal_time, paired_difference
from wakeful.estimates import Estimate, mean_and_error, reach

LOSS = "loss"
"""The figure, and the group, that all others are set against."""
COST = "cost"
"""The group in which rows differ because they are built to."""
_OVERALL = "overall"


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


def ranking_of(comparison: Comparison) -> Ranking | None:
    """Return the ranks by the first table named whose columns say which way is better.

    In each seed, variants are ranked in each column, 1 the best, and those that are equal share the
    mean of their ranks. A group's rank is the mean of its columns', the overall rank the mean of
    the groups'; over seeds they have a mean and an interval.

    None where no table ranks, or no seed is finished by all variants.
    """
    ranked = _ranked_table(comparison)
    seeds = _common_seeds(comparison)
    return _ranking(comparison, *ranked, seeds) if ranked and seeds else None


def lacks_common_seed(comparison: Comparison) -> bool:
    """Return whether there would be ranks if the variants had a finished seed in common."""
    return _ranked_table(comparison) is not None and not _common_seeds(comparison)


def _ranked_table(comparison: Comparison) -> tuple[PublishedTable, list[Column]] | None:
    """Return the first table with columns that have a better side, and those; None of one variant
    or where there is none."""
    if len(comparison.variants) < 2:
        return None
    for layout in comparison.layouts:
        table = as_trained(comparison, layout)
        columns = [column for column in table.columns if column.better]
        if columns:
            return table, columns
    return None


def _common_seeds(comparison: Comparison) -> tuple[int, ...]:
    finished = [{run.seed for run in comparison.of(name)} for name in comparison.variants]
    return tuple(sorted(set.intersection(*finished)))


def _ranking(
    comparison: Comparison,
    table: PublishedTable,
    columns: Sequence[Column],
    seeds: tuple[int, ...],
) -> Ranking:
    figures = {
        (column.figure, variant): by_seed(comparison, variant, column.figure)
        for column in columns
        for variant in comparison.variants
    }
    groups = tuple(dict.fromkeys(column.group for column in columns))
    found: dict[str, dict[str, list[float]]] = {
        variant: {name: [] for name in (*groups, _OVERALL)} for variant in comparison.variants
    }
    for seed in seeds:
        ranks = [(column.group, _ranks(comparison, column, figures, seed)) for column in columns]
        for variant, over_seeds in found.items():
            mine: list[float] = []
            for group in groups:
                those = [ranked[variant] for name, ranked in ranks
                         if name == group and variant in ranked]  # fmt: skip
                if those:
                    mine.append(fmean(those))
                    over_seeds[group].append(mine[-1])
            over_seeds[_OVERALL].append(fmean(mine) if mine else math.nan)
    timed = equal_time(comparison)
    rows = [
        _row(comparison, variant, over_seeds, timed.get(variant), len(seeds))
        for variant, over_seeds in found.items()
    ]
    apart = [column for column in columns if column.group != COST]
    return Ranking(
        groups=groups,
        rows=tuple(sorted(rows, key=lambda row: row.overall[0])),
        fronts=tuple(
            front
            for column in columns
            if column.front and (LOSS, comparison.baseline) in figures
            if (front := _front(comparison, column, figures, seeds)) is not None
        ),
        seeds=seeds,
        num_columns=len(apart),
        inseparable=tuple(
            variant
            for variant in comparison.variants
            if variant != table.baseline
            and not any(
                separated(
                    paired(figures[column.figure, variant], figures[column.figure, table.baseline])
                )
                for column in apart
            )
        ),
    )


def _ranks(
    comparison: Comparison,
    column: Column,
    figures: Mapping[tuple[str, str], Mapping[int, float]],
    seed: int,
) -> dict[str, float]:
    """Return the rank in one column of each variant that has its figure with this seed."""
    values = {
        variant: figures[column.figure, variant][seed]
        for variant in comparison.variants
        if seed in figures[column.figure, variant]
    }
    places = pl.Series(values.values()).rank("average", descending=column.better == "higher")
    return dict(zip(values, places.to_list(), strict=True))


def _row(
    comparison: Comparison,
    variant: str,
    found: Mapping[str, Sequence[float]],
    same_time: Estimate | None,
    seeds: int,
) -> Ranked:
    overall = mean_and_error(found[_OVERALL])
    return Ranked(
        variant=variant,
        groups={name: fmean(ranks) for name, ranks in found.items() if ranks and name != _OVERALL},
        overall=overall,
        reach=reach(overall[1], seeds),
        difference=paired_difference(comparison, variant),
        same_time=same_time,
    )


def _front(
    comparison: Comparison,
    column: Column,
    figures: Mapping[tuple[str, str], Mapping[int, float]],
    seeds: Sequence[int],
) -> Front | None:
    """Return loss against a column; None where no variant has its figure with all the seeds."""
    points: list[dict[str, object]] = []
    for variant in comparison.variants:
        named = {"x": figures[column.figure, variant], LOSS: figures[LOSS, variant]}
        means = {
            name: mean_and_error([of[seed] for seed in seeds])
            for name, of in named.items()
            if all(seed in of for seed in seeds)
        }
        if len(means) == len(named):
            point: dict[str, object] = {"variant": variant}
            for name, (mean, error) in means.items():
                point |= {name: mean, f"{name}_error": error}
            points.append(point)
    if not points:
        return None
    frame = pl.DataFrame(points)
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
