"""A comparison laid out as an exhibit's table: ranks where its columns say which way is better, and
its figures beside the printed ones.
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
from wakeful_papers.exhibits.exhibit import exhibit, exhibit_names
from wakeful_papers.exhibits.filled import FilledCell, filled
from wakeful_papers.exhibits.ranks import Ranking, lacks_common_seed, ranking_of
from wakeful_papers.exhibits.table import PublishedTable
from wakeful_papers.reports.rank_charts import front_charts, rank_chart


@dataclass(frozen=True)
class TableLayout:
    """A published table as a layout of comparisons (`wakeful.training.layouts.Layout`)."""

    table: PublishedTable

    def __call__(self, comparison: ComparedRuns) -> list[Section]:
        """Return the ranks, and the table with the comparison's figures in it."""
        ranking = ranking_of(comparison, self.table)
        sections = [_printed(comparison, self.table)]
        if lacks_common_seed(comparison, self.table):
            note = "The variants are not ranked: they have no finished seed in common."
            sections.insert(0, Section("Ranks", [Text(note, "caveat")]))
        if ranking is not None:
            sections = [_ranks(comparison, ranking), _fronts(comparison, ranking), *sections]
        return sections


class _Layouts(Mapping[str, TableLayout]):
    """Every exhibit's table, by the exhibit's name: each is read when it is asked for."""

    def __getitem__(self, name: str) -> TableLayout:
        return TableLayout(exhibit(name).table)

    def __iter__(self) -> Iterator[str]:
        return iter(exhibit_names())

    def __len__(self) -> int:
        return len(exhibit_names())

    def __contains__(self, name: object) -> bool:
        return name in exhibit_names()


LAYOUTS = _Layouts()
"""What comparisons may be laid out as."""


def _inseparable(comparison: ComparedRuns, ranking: Ranking) -> list[str]:
    """Say which variants differ from the baseline in nothing that was measured; costs aside."""
    if len(ranking.seeds) < 2:
        return []
    where = f"of the {ranking.num_columns} ranked figures that are not costs"
    base = comparison.baseline
    if not ranking.inseparable:
        return [f"Each variant differs significantly from {base} in at least one {where}."]
    names = ", ".join(ranking.inseparable)
    return [f"Not significantly different from {base} in any {where}: {names}."]


def _ranks(comparison: ComparedRuns, ranking: Ranking) -> Section:
    several, tokens = len(ranking.seeds) > 1, tables.same_tokens(comparison)
    over = errors_over(comparison)
    rows = []
    for row in ranking.rows:
        rank = f"{row.overall[0]:.1f}" + (f" ± {row.reach:.1f}" if several else "")
        losses = ["baseline"] * 2
        if row.variant != comparison.baseline:
            losses = [format_estimate(*row.difference, "+"),
                      format_estimate(*row.same_time, "+") if row.same_time else "–"]  # fmt: skip
        groups = (
            f"{row.groups[each]:.1f}" if each in row.groups else "–" for each in ranking.groups
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


def _printed(comparison: ComparedRuns, published: PublishedTable) -> Section:
    """Return a published table with ours in it; its paper's claims are not judged here."""
    table = filled(comparison, published)
    published = table.published
    rows = [[row.label, *map(_beside, row.cells)] for row in table.rows]
    said = "One seed, which leaves no standard error."
    if len(comparison.seeds) > 1:
        said = (
            "Means over seeds ± one standard error. Bold: the 95% confidence interval (Student's "
            "t) of the difference from the first row, paired over seeds, leaves out zero; of this "
            "many cells one in twenty would by chance."
        )
    missing = ""
    if table.missing:
        missing = f" Rows of the paper that were not trained: {'; '.join(table.missing)}."
    return Section(published.title, [
        Table(["row", *(each.title for each in published.columns)], rows, published.title, "paper",
              terminal=()),
        terms((each.title, each.figure) for each in published.columns),
        Text(f"{said} Means over layers are over block outputs, the embedding left out. "
             f"{published.note}{missing}", "note"),
    ])  # fmt: skip


def _beside(cell: FilledCell) -> Cell:
    """Return a figure of ours with the printed one under it."""
    if cell.value is None:
        return Cell("–")
    mean, error = cell.value
    under = [] if math.isnan(error) else [f"± {figure(error)}"]
    if cell.printed is not None:
        printed = cell.printed if isinstance(cell.printed, str) else figure(cell.printed)
        under.append(f"paper {printed}")
    return Cell(figure(mean), under=under, style="bold" if cell.separated else "")


def figure(value: float) -> str:
    """Return a figure to three or more digits, small ones with a power of ten, counts whole."""
    if 0 < abs(value) < 1e-3:
        text = f"{value:.2g}"
    elif value == 0 or (abs(value) >= 100 and value == round(value)):
        text = f"{value:,.0f}"
    elif abs(value) >= 100:
        text = f"{value:,.1f}"
    else:
        text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.replace("-", "−")
