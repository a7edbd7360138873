"""The summary table on the terminal."""

from typing import get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wakeful.estimates import with_error
from wakeful.pages.comparison.paper_table import Outcome, PaperTable, paper_tables
from wakeful.pages.comparison.tables import Comparison, summary_table
from wakeful.pages.comparison.verdict import caveat, seeds_missing, verdicts


def render_terminal(comparison: Comparison) -> RenderableType:
    """Return the verdicts and the summary table, ready to print."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("variant", no_wrap=True)
    several = len(comparison.seeds) > 1
    for column in (
        *(["seeds"] if several else []),
        "loss",
        "difference",
        "parameters",
        "B/token",
        "tokens/s",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in summary_table(comparison).iter_rows(named=True):
        baseline = row["variant"] == comparison.baseline
        table.add_row(
            Text(_plain(row["variant"])),
            *([row["seeds_used"]] if several else []),
            with_error(row["loss"], row["loss_error"]),
            "baseline" if baseline else with_error(row["difference"], row["difference_error"], "+"),
            f"{row['parameters']:,}",
            f"{row['cache_bytes']:,}",
            f"{row['tokens_per_second']:,.0f}",
        )
    lines = [Text(_plain(sentence)) for sentence in verdicts(comparison)]
    notes = [caveat(comparison)]
    if seeds_missing(comparison):
        notes.append(seeds_missing(comparison))
    if comparison.unfinished:
        notes.append(f"Not finished and left out: {'; '.join(comparison.unfinished)}.")
    dim = [Text(_plain(note), style="dim") for note in notes]
    papers = [Text(line) for paper in paper_tables(comparison) for line in _paper(paper)]
    return Group(Text(), *lines, *dim, Text(), table, Text(), *papers)


def _paper(table: PaperTable) -> list[str]:
    if not table.outcomes:
        return []
    counts = ", ".join(f"{table.outcomes[name]} {name}" for name in get_args(Outcome))
    return [
        f"{table.published.title}: {counts}.",
        *(f"  {line}" for line in table.sentences),
        "",
    ]


def _plain(text: str) -> str:
    """Replace what would steer a terminal: a name may hold anything."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
