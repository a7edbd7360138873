"""Layouts of comparisons as an exhibit's table: ranks if its columns have a better direction, and
our figures next to the printed ones.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from wakeful.estimates import format_estimate
from wakeful.reports.value import Cell, Chart, Section, SideBySide, Table, Text, terms
from wakeful.training import tables
from wakeful.training.compared import ComparedRuns
from wakeful.training.report import errors_over
from wakeful_papers.exhibits.exhibit import exhibit_names, read_exhibit
from wakeful_papers.exhibits.filled import FilledCell, fill_table
from wakeful_papers.exhibits.ranks import Ranking, has_no_common_seed, rank_variants
from wakeful_papers.exhibits.table import PublishedTable
from wakeful_papers.reports.rank_charts import front_charts, rank_chart


@dataclass(frozen=True)
class TableLayout:
    """A published table as a layout of comparisons (`wakeful.training.layouts.Layout`)."""

    table: PublishedTable

    def __call__(self, comparison: ComparedRuns) -> list[Section]:
        """Return sections with the ranks and with the table, filled with our figures."""
        ranking = rank_variants(comparison, self.table)
        sections = [_published_section(comparison, self.table)]
        if has_no_common_seed(comparison, self.table):
            note = "The variants are not ranked: they have no finished seed in common."
            sections.insert(0, Section("Ranks", [Text(note, "caveat")]))
        if ranking is not None:
            sections = [_ranks(comparison, ranking), _fronts(comparison, ranking), *sections]
        return sections


class _Layouts(Mapping[str, TableLayout]):
    """Every exhibit's table by the exhibit's name, read on access."""

    def __getitem__(self, name: str) -> TableLayout:
        return TableLayout(read_exhibit(name).table)

    def __iter__(self) -> Iterator[str]:
        return iter(exhibit_names())

    def __len__(self) -> int:
        return len(exhibit_names())

    def __contains__(self, name: object) -> bool:
        return name in exhibit_names()


LAYOUTS = _Layouts()
"""Layouts for comparisons, by exhibits' names."""


def _inseparable(comparison: ComparedRuns, ranking: Ranking) -> list[str]:
    """Return a sentence on variants that differ in no figure but costs; none for a single seed."""
    if len(ranking.seeds) < 2:
        return []
    scope = f"of the {ranking.num_columns} ranked figures that are not costs"
    base = comparison.baseline
    if not ranking.inseparable:
        return [f"Each variant differs significantly from {base} in at least one {scope}."]
    names = ", ".join(ranking.inseparable)
    return [f"Not significantly different from {base} in any {scope}: {names}."]


def _ranks(comparison: ComparedRuns, ranking: Ranking) -> Section:
    several, tokens = len(ranking.seeds) > 1, tables.same_tokens(comparison)
    over = errors_over(comparison)
    rows = []
    for row in ranking.rows:
        rank = f"{row.overall[0]:.1f}" + (f" ± {row.half_width:.1f}" if several else "")
        losses = ["baseline"] * 2
        if row.variant != comparison.baseline:
            losses = [format_estimate(*row.difference, "+"),
                      format_estimate(*row.same_time, "+") if row.same_time else "–"]  # fmt: skip
        groups = (
            f"{row.groups[name]:.1f}" if name in row.groups else "–" for name in ranking.groups
        )
        rows.append([row.variant, rank, *groups, *losses])
    columns = ["variant", "overall", *ranking.groups,
               f"loss, {'equal tokens' if tokens else 'at the end'}",
               "loss, equal time"]  # fmt: skip
    intervals = "One seed that all have finished leaves no interval."
    if several:
        intervals = (
            f"The intervals are 95% confidence intervals (Student's t) over the "
            f"{len(ranking.seeds)} seeds that all have finished."
        )
    alone = "" if over == "over seeds" else "; at equal time over seeds alone"
    unlike = "" if tokens else "Not all were trained on equally many tokens. "
    return Section("Ranks", [
        Text("In each seed the variants are ranked in every column of the table that has a better "
             "side, 1 the best; equal ones share the mean of their ranks. A group's rank is the "
             f"mean of its columns', the overall rank the mean of the groups'. {intervals}"),
        *map(Text, _inseparable(comparison, ranking)),
        Chart("Overall rank", partial(rank_chart, comparison, ranking)),
        Table(columns, rows, "Ranks of each variant"),
        Text(f"Losses are nats above {comparison.baseline}'s, paired, ± one standard error {over}"
             f"{alone}. {unlike}At equal time both are read when the faster of the two ends, the "
             "slower off its curve of validation losses: its learning rate is still higher then. "
             "Times are of each run's median step; runs that did not take turns on an idle machine "
             "do not compare to the percent.", "note"),
    ])  # fmt: skip


def _fronts(comparison: ComparedRuns, ranking: Ranking) -> Section:
    mean = "'s mean over seeds" if len(ranking.seeds) > 1 else ""
    return Section("What a lower loss costs", [
        Text(f"Each point is a variant{mean}. The labeled, connected points are the Pareto front: "
             "no other variant is at least as good in both and better in one. "
             f"{comparison.baseline} is orange. A triangle at the edge stands for a point far "
             "beyond it, and its label has the figure."),
        SideBySide(front_charts(comparison, ranking), wide=True),
    ])  # fmt: skip


def _published_section(comparison: ComparedRuns, published: PublishedTable) -> Section:
    """Return a published table with our figures; this does not judge its paper's claims."""
    table = fill_table(comparison, published)
    published = table.published
    titles = [column.title for column in published.columns]
    rows = [[row.label, *map(_format_cell, row.cells)] for row in table.rows]
    note = "One seed, which leaves no standard error."
    if len(comparison.seeds) > 1:
        note = (
            "Means over seeds ± one standard error. Bold: the 95% confidence interval (Student's "
            "t) of the difference from the first row, paired over seeds, leaves out zero; of this "
            "many cells one in twenty would by chance."
        )
    missing = ""
    if table.missing:
        missing = f" Rows of the paper that were not trained: {'; '.join(table.missing)}."
    return Section(published.title, [
        Table(["row", *titles], rows, published.title, "paper", terminal=()),
        terms((column.title, column.figure) for column in published.columns),
        Text(f"{note} Means over layers are over block outputs, the embedding left out. "
             f"{published.note}{missing}", "note"),
    ])  # fmt: skip


def _format_cell(cell: FilledCell) -> Cell:
    """Return our figure with the printed one under it."""
    if cell.value is None:
        return Cell("–")
    mean, error = cell.value
    under = [] if math.isnan(error) else [f"± {format_figure(error)}"]
    if cell.printed is not None:
        printed = cell.printed if isinstance(cell.printed, str) else format_figure(cell.printed)
        under.append(f"paper {printed}")
    return Cell(format_figure(mean), under=under, style="bold" if cell.is_significant else "")


def format_figure(value: float) -> str:
    """Return a figure with three digits, below 0.001 two, from 100 on at most one decimal place."""
    if 0 < abs(value) < 1e-3:
        text = f"{value:.2g}"
    elif value == 0 or (abs(value) >= 100 and value == round(value)):
        text = f"{value:,.0f}"
    elif abs(value) >= 100:
        text = f"{value:,.1f}"
    else:
        text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.replace("-", "−")
