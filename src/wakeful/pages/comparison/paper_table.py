"""A comparison laid out as a paper's table, with what it says of the paper's directions."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from wakeful.estimates import Estimate, mean_and_error, perplexity, reach, weighted_mean
from wakeful.pages.comparison.published import Column, Direction, PublishedTable, published
from wakeful.pages.comparison.reading import Comparison, TrainedRun
from wakeful.pages.comparison.tables import Growth, sink_growth

Outcome = Literal["confirmed", "reversed", "not resolved"]
_GROWN: dict[str, Outcome] = {
    "grows": "confirmed",
    "shrinks": "reversed",
    "not resolved": "not resolved",
}
_INCREASE = "increase_"
_FORMER_NAMES = {
    "first_key_share_without_row_0": "first_key_share",
    "first_key_mass_with_row_0": "first_key_mass",
}
"""What older runs logged these figures as. Their means over layers count the embedding too."""


@dataclass(frozen=True)
class Cell:
    """A figure's mean over seeds, its difference to the baseline's, and the paper's word on it."""

    value: Estimate | None
    """None where no run measured it."""
    difference: Estimate | None
    """Paired over seeds; None for the baseline and where there is none to pair with."""
    printed: float | None
    """The paper's figure."""
    direction: Direction | None
    """How the paper's differs from its baseline."""
    outcome: Outcome | None
    """None where the paper has no direction."""


@dataclass(frozen=True)
class Row:
    """A variant's cells, in the order of the table's columns."""

    variant: str
    label: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class PaperTable:
    """A published table with measured figures in its place."""

    published: PublishedTable
    rows: tuple[Row, ...]
    missing: tuple[str, ...]
    """Rows of the paper that the comparison does not have."""
    growth: tuple[Growth, ...] = ()
    """Of the variants in which the paper saw a sink grow."""

    @property
    def outcomes(self) -> Counter[Outcome]:
        """How many of the paper's directions are confirmed, reversed and not resolved."""
        found: Counter[Outcome] = Counter()
        for growth in self.growth:
            found[_GROWN[growth.outcome]] += 1
        for row in self.rows:
            for cell in row.cells:
                if cell.outcome is not None:
                    found[cell.outcome] += 1
        return found

    @property
    def sentences(self) -> list[str]:
        """One sentence for every cell that the paper gives a direction."""
        grown = [
            f"{self.published.labels[each.variant]}: a sink grows in the paper, attention on BOS "
            f"{each.change[0]:+.3g}{_spread(each.change[1])} here: {_GROWN[each.outcome]}."
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

    A direction is judged by the paired difference over seeds d ± e with t, the 97.5% quantile of
    Student's t: `lower` and `higher` are confirmed where d ± t e leaves out zero on that side and
    reversed where it does on the other. `same` is confirmed where d ± t e lies within ± the share
    the table calls the same, and reversed where it lies wholly outside. All else, and a single
    seed, is not resolved.
    """
    return [_table(comparison, published(name)) for name in comparison.layouts]


def _table(comparison: Comparison, layout: PublishedTable) -> PaperTable:
    rows: list[Row] = []
    missing: list[str] = []
    for variant, label in layout.labels.items():
        if variant in comparison.variants:
            cells = (_cell(comparison, layout, variant, column) for column in layout.columns)
            rows.append(Row(variant, label, tuple(cells)))
        else:
            missing.append(label)
    growth = (each for each in sink_growth(comparison) if each.variant in layout.grows)
    return PaperTable(layout, tuple(rows), tuple(missing), tuple(growth))


def _cell(comparison: Comparison, layout: PublishedTable, variant: str, column: Column) -> Cell:
    printed = layout.cells.get((variant, column.figure))
    direction = layout.direction(variant, column)
    values = _by_seed(comparison, variant, column.figure)
    base = _by_seed(comparison, layout.baseline, column.figure)
    both = [seed for seed in values if seed in base]
    difference = None
    if variant != layout.baseline and both:
        difference = mean_and_error([values[seed] - base[seed] for seed in both])
    outcome: Outcome | None = None
    if direction is not None:
        margin = column.same * abs(mean_and_error([*base.values()])[0]) if base else 0.0
        outcome = _judge(direction, difference, len(both), margin)
    return Cell(
        value=mean_and_error([*values.values()]) if values else None,
        difference=difference,
        printed=printed if isinstance(printed, int | float) else None,
        direction=direction,
        outcome=outcome,
    )


def _by_seed(comparison: Comparison, variant: str, name: str) -> dict[int, float]:
    if variant not in comparison.variants:
        return {}
    found = {run.seed: figure(run, name) for run in comparison.of(variant)}
    return {seed: value for seed, value in found.items() if value is not None}


def _judge(direction: Direction, difference: Estimate | None, seeds: int, margin: float) -> Outcome:
    if difference is None or math.isnan(difference[1]):
        return "not resolved"
    beyond = reach(difference[1], seeds)
    low, high = difference[0] - beyond, difference[0] + beyond
    if direction == "same":
        if -margin <= low and high <= margin:
            return "confirmed"
        return "reversed" if low > margin or high < -margin else "not resolved"
    if low <= 0 <= high:
        return "not resolved"
    return "confirmed" if (high < 0) == (direction == "lower") else "reversed"


def _says(cell: Cell) -> str:
    expected = "the same" if cell.direction == "same" else cell.direction
    if cell.difference is None:
        return f"{expected} in the paper, not measured here: not resolved."
    difference, error = cell.difference
    return f"{expected} in the paper, {difference:+.3g}{_spread(error)} here: {cell.outcome}."


def _spread(error: float) -> str:
    return "" if math.isnan(error) else f" ± {error:.3g}"


def figure(run: TrainedRun, name: str) -> float | None:
    """Return one figure of a run; None where the run did not measure it.

    `perplexity` of the whole validation set, and of a task `excess_loss`; `increase_SCHEME`, its
    increase by quantization; `steps_per_second`; `training_megabytes`, a GPU's peak, or else the
    weights, their gradients and the optimizer's state; and whatever `[train.diagnose]` logs, such
    as `kurtosis_rest`.
    """
    if name == "perplexity":
        return perplexity(weighted_mean(run.validation["loss"], run.validation["tokens"])[0])
    if name == "excess_loss":
        return run.summary.validation.excess_loss
    if name.startswith(_INCREASE):
        return run.summary.quantization.get(name.removeprefix(_INCREASE), {}).get("increase")
    if name == "steps_per_second":
        tokens_a_step = run.config.train.batch_size * run.config.train.length
        return run.summary.tokens_per_second / tokens_a_step
    if name == "training_megabytes":
        return _megabytes(run.summary.bytes)
    found = run.summary.diagnosis.get(name)
    return run.summary.diagnosis.get(_FORMER_NAMES.get(name, "")) if found is None else found


def counting_the_embedding(comparison: Comparison) -> list[str]:
    """Return the variants with runs that logged means over layers with the embedding among them."""
    former = _FORMER_NAMES.values()
    found = (
        run.variant
        for run in comparison.runs
        if any(run.summary.diagnosis.get(name) is not None for name in former)
    )
    return list(dict.fromkeys(found))


def _megabytes(sizes: Mapping[str, int]) -> float | None:
    if "peak" in sizes:
        return sizes["peak"] / 1e6
    if not {"weights", "optimizer"} <= sizes.keys():
        return None
    # A gradient takes what its weight does.
    return (2 * sizes["weights"] + sizes["optimizer"]) / 1e6
