"""A published table filled in by a comparison: each figure with the printed one beside it."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wakeful.estimates import Estimate, interval_half_width, mean_and_error
from wakeful.training.compared import ComparedRuns
from wakeful_papers.exhibits.run_figures import figure_of
from wakeful_papers.exhibits.table import PublishedTable


@dataclass(frozen=True)
class FilledCell:
    """A figure's mean over seeds, and what is printed in its place."""

    value: Estimate | None
    """None where no run measured it."""
    separated: bool
    """Whether the 95% interval of its difference to the baseline's, paired over seeds, leaves out
    zero.
    """
    printed: float | str | None


@dataclass(frozen=True)
class FilledRow:
    """A variant's cells, in the order of the table's columns."""

    variant: str
    label: str
    cells: tuple[FilledCell, ...]


@dataclass(frozen=True)
class Filled:
    """A published table with measured figures in its place."""

    published: PublishedTable
    rows: tuple[FilledRow, ...]
    missing: tuple[str, ...]
    """Printed rows that the comparison does not have."""


def as_trained(comparison: ComparedRuns, layout: PublishedTable) -> PublishedTable:
    """Return a table without rows as one of the comparison's own, with the columns it measured."""
    if layout.labels:
        return layout
    columns = tuple(
        column
        for column in layout.columns
        if any(by_seed(comparison, variant, column.figure) for variant in comparison.variants)
    )
    return dataclasses.replace(
        layout,
        baseline=comparison.baseline,
        columns=columns,
        labels={variant: variant for variant in comparison.variants},
    )


def filled(comparison: ComparedRuns, layout: PublishedTable) -> Filled:
    """Return a table with a comparison's figures in it."""
    layout = as_trained(comparison, layout)
    labels, there = layout.labels.items(), comparison.variants
    figures = [column.figure for column in layout.columns]
    rows = (
        FilledRow(name, label, tuple(_cell(comparison, layout, name, each) for each in figures))
        for name, label in labels
        if name in there
    )
    missing = (label for name, label in labels if name not in there)
    return Filled(layout, tuple(rows), tuple(missing))


def _cell(comparison: ComparedRuns, layout: PublishedTable, variant: str, name: str) -> FilledCell:
    values = by_seed(comparison, variant, name)
    base = by_seed(comparison, layout.baseline, name)
    # As everywhere on the page, of the seeds that both have where there are any.
    values = {seed: value for seed, value in values.items() if seed in base} or values
    return FilledCell(
        mean_and_error([*values.values()]) if values else None,
        variant != layout.baseline and separated(paired(values, base)),
        layout.cells.get((variant, name)),
    )


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return the differences of two variants' figures, of the seeds that both have."""
    return [value - theirs[seed] for seed, value in ours.items() if seed in theirs]


def separated(gaps: Sequence[float]) -> bool:
    """Whether the 95% interval of the mean of paired differences leaves out zero."""
    if not gaps:
        return False
    mean, error = mean_and_error(gaps)
    return abs(mean) > interval_half_width(error, len(gaps))


def by_seed(comparison: ComparedRuns, variant: str, name: str) -> dict[int, float]:
    """Return a figure of a variant's finished runs, those that measured it, by seed."""
    if variant not in comparison.variants:
        return {}
    found = {run.seed: figure_of(run, name) for run in comparison.of(variant)}
    return {seed: value for seed, value in found.items() if value is not None}
