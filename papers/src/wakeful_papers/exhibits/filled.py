"""A published table filled with a comparison's figures next to the printed ones."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wakeful.estimates import Estimate, interval_half_width, mean_and_error
from wakeful.training.compared import ComparedRuns
from wakeful_papers.exhibits.run_figures import run_figure
from wakeful_papers.exhibits.table import PublishedTable


@dataclass(frozen=True)
class FilledCell:
    """A figure's mean over seeds with its standard error, and the printed value."""

    value: Estimate | None
    """None if no run measured it."""
    is_significant: bool
    """True if the 95% interval of its paired difference from the baseline's excludes zero."""
    printed: float | str | None


@dataclass(frozen=True)
class FilledRow:
    """A variant's cells, in the order of the table's columns."""

    variant: str
    label: str
    cells: tuple[FilledCell, ...]


@dataclass(frozen=True)
class FilledTable:
    """A published table with measured figures in its cells."""

    published: PublishedTable
    rows: tuple[FilledRow, ...]
    missing: tuple[str, ...]
    """Printed rows that the comparison does not have."""


def fill_rows(comparison: ComparedRuns, layout: PublishedTable) -> PublishedTable:
    """Return a table; one without rows gets the comparison's variants and measured columns."""
    if layout.labels:
        return layout
    columns = tuple(
        column
        for column in layout.columns
        if any(seed_values(comparison, variant, column.figure) for variant in comparison.variants)
    )
    return dataclasses.replace(
        layout,
        baseline=comparison.baseline,
        columns=columns,
        labels={variant: variant for variant in comparison.variants},
    )


def fill_table(comparison: ComparedRuns, layout: PublishedTable) -> FilledTable:
    """Return a published table filled with a comparison's figures."""
    layout = fill_rows(comparison, layout)
    labels, variants = layout.labels.items(), comparison.variants
    figures = [column.figure for column in layout.columns]
    rows = (
        FilledRow(name, label, tuple(_cell(comparison, layout, name, figure) for figure in figures))
        for name, label in labels
        if name in variants
    )
    missing = (label for name, label in labels if name not in variants)
    return FilledTable(layout, tuple(rows), tuple(missing))


def _cell(comparison: ComparedRuns, layout: PublishedTable, variant: str, name: str) -> FilledCell:
    values = seed_values(comparison, variant, name)
    base = seed_values(comparison, layout.baseline, name)
    # As everywhere on the page, only seeds that both have count, if there are any.
    values = {seed: value for seed, value in values.items() if seed in base} or values
    return FilledCell(
        mean_and_error([*values.values()]) if values else None,
        variant != layout.baseline and is_significant(seed_differences(values, base)),
        layout.cells.get((variant, name)),
    )


def seed_differences(values: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    """Return a variant's figures minus the baseline's, for the seeds that both have."""
    return [value - base[seed] for seed, value in values.items() if seed in base]


def is_significant(differences: Sequence[float]) -> bool:
    """Return True if the 95% interval of the mean of paired differences excludes zero."""
    if not differences:
        return False
    mean, error = mean_and_error(differences)
    return abs(mean) > interval_half_width(error, len(differences))


def seed_values(comparison: ComparedRuns, variant: str, name: str) -> dict[int, float]:
    """Return a figure by seed, for a variant's finished runs that measured it."""
    if variant not in comparison.variants:
        return {}
    values = {run.seed: run_figure(run, name) for run in comparison.of(variant)}
    return {seed: value for seed, value in values.items() if value is not None}
