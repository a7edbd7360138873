"""A comparison laid out as a paper's table, with what it says of the paper's directions."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wakeful.comparison.figures import figure
from wakeful.comparison.outcomes import Direction, Outcome, outcome_of
from wakeful.comparison.published import Column, PublishedTable
from wakeful.comparison.reading import Comparison
from wakeful.comparison.tables import Growth, sink_growth
from wakeful.estimates import Estimate, mean_and_error, reach, with_error

_GROWN: dict[str, Outcome] = {
    "grows": "confirmed",
    "shrinks": "reversed",
    "not resolved": "not resolved",
}


@dataclass(frozen=True)
class PaperCell:
    """A figure's mean over seeds, its difference to the baseline's, and the paper's word on it."""

    value: Estimate | None
    """None where no run measured it."""
    difference: Estimate | None
    """Paired over seeds; None for the baseline and where there is none to pair with."""
    separated: bool
    """Whether the difference's 95% interval leaves out zero."""
    printed: float | None
    """The paper's figure."""
    direction: Direction | None
    """How the paper's differs from its baseline."""
    outcome: Outcome | None
    """None where the paper has no direction."""
    size: bool | None = None
    """Whether the difference of the paper's figures lies in the 95% interval of ours; None where
    there is none, or a single seed.
    """


@dataclass(frozen=True)
class PaperRow:
    """A variant's cells, in the order of the table's columns."""

    variant: str
    label: str
    cells: tuple[PaperCell, ...]


@dataclass(frozen=True)
class PaperTable:
    """A published table with measured figures in its place."""

    published: PublishedTable
    rows: tuple[PaperRow, ...]
    missing: tuple[str, ...]
    """Rows of the paper that the comparison does not have."""
    growth: tuple[Growth, ...] = ()
    """Of the variants in which the paper saw a sink grow."""

    @property
    def outcomes(self) -> Counter[Outcome]:
        """How many of the paper's directions are confirmed, reversed and not resolved."""
        found: Counter[Outcome] = Counter(_GROWN[each.outcome] for each in self.growth)
        found.update(cell.outcome for row in self.rows for cell in row.cells if cell.outcome)
        return found

    @property
    def sentences(self) -> list[str]:
        """One sentence for every cell that the paper gives a direction."""
        grown = [
            f"{self.published.labels[each.variant]}: a sink grows in the paper, attention on BOS "
            f"{with_error(*each.change, '+')} here: {_GROWN[each.outcome]}."
            for each in self.growth
        ]
        return grown + [
            f"{row.label}: {column.title} {_says(cell)}"
            for row in self.rows
            for column, cell in zip(self.published.columns, row.cells, strict=True)
            if cell.outcome is not None
        ]


def paper_tables(comparison: Comparison) -> list[PaperTable]:
    """Return a comparison as each published table that it names.

    A direction is judged by the paired difference over seeds, as `outcomes.outcome_of` does; `same`
    is within the share that the table calls the same.
    """
    return [_table(comparison, layout) for layout in comparison.layouts]


def as_trained(comparison: Comparison, layout: PublishedTable) -> PublishedTable:
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


def _table(comparison: Comparison, layout: PublishedTable) -> PaperTable:
    layout = as_trained(comparison, layout)
    labels, there = layout.labels.items(), comparison.variants
    rows = (
        PaperRow(name, label, tuple(_cell(comparison, layout, name, c) for c in layout.columns))
        for name, label in labels
        if name in there
    )
    missing = (label for name, label in labels if name not in there)
    growth = (each for each in sink_growth(comparison) if each.variant in layout.grows)
    return PaperTable(layout, tuple(rows), tuple(missing), tuple(growth))


def _cell(
    comparison: Comparison, layout: PublishedTable, variant: str, column: Column
) -> PaperCell:
    printed, first = (
        value if isinstance(value, int | float) else None
        for value in (layout.cells.get((row, column.figure)) for row in (variant, layout.baseline))
    )
    direction = layout.direction(variant, column)
    values = by_seed(comparison, variant, column.figure)
    base = by_seed(comparison, layout.baseline, column.figure)
    # As everywhere on the page, of the seeds that both have where there are any.
    values = {seed: value for seed, value in values.items() if seed in base} or values
    gaps = paired(values, base)
    difference = mean_and_error(gaps) if variant != layout.baseline and gaps else None
    outcome: Outcome | None = None
    if direction is not None:
        # Of the seeds that are paired.
        theirs = [value for seed, value in base.items() if seed in values]
        margin = column.same * abs(mean_and_error(theirs)[0]) if theirs else 0.0
        outcome = outcome_of(direction, difference, len(gaps), margin)
    size: bool | None = None
    if printed is not None and first is not None and difference and math.isfinite(difference[1]):
        size = abs(printed - first - difference[0]) <= reach(difference[1], len(gaps))
    return PaperCell(
        value=mean_and_error([*values.values()]) if values else None,
        difference=difference,
        separated=difference is not None and separated(gaps),
        printed=printed,
        direction=direction,
        outcome=outcome,
        size=size,
    )


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return the differences of two variants' figures, of the seeds that both have."""
    return [value - theirs[seed] for seed, value in ours.items() if seed in theirs]


def separated(gaps: Sequence[float]) -> bool:
    """Whether the 95% interval of the mean of paired differences leaves out zero."""
    if not gaps:
        return False
    mean, error = mean_and_error(gaps)
    return abs(mean) > reach(error, len(gaps))


def by_seed(comparison: Comparison, variant: str, name: str) -> dict[int, float]:
    """Return a figure of a variant's finished runs, those that measured it, by seed."""
    if variant not in comparison.variants:
        return {}
    found = {run.seed: figure(run, name) for run in comparison.of(variant)}
    return {seed: value for seed, value in found.items() if value is not None}


def _says(cell: PaperCell) -> str:
    expected = "the same" if cell.direction == "same" else cell.direction
    if cell.difference is None:
        return f"{expected} in the paper, not measured here: not resolved."
    difference, error = cell.difference
    size = "" if cell.size is None else f", the paper's size {'in' if cell.size else 'out'}side"
    return (
        f"{expected} in the paper, {with_error(difference, error, '+')} here: {cell.outcome}{size}."
    )
