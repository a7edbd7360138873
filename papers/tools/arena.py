"""Write the table of every column of finished arenas: python papers/tools/arena.py FOLDER...

What the page has of comparisons whose folders are not named stays.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path

from wakeful.estimates import format_estimate
from wakeful.training.compared import ComparedRuns, read_comparison
from wakeful.training.tables import machines, same_tokens
from wakeful_papers.exhibits.exhibit import read_exhibit
from wakeful_papers.exhibits.filled import FilledCell, FilledRow, fill_table
from wakeful_papers.exhibits.ranks import LOSS, RankedVariant, rank_variants
from wakeful_papers.exhibits.table import Column

PAGE = Path(__file__).resolve().parent.parent / "docs" / "arena-table.md"
HEAD = """\
# The arena's table

All figures of the arenas, with one table for each group of columns. [The
arena](arena.md#what-the-page-shows) explains the columns; the
[archive](../../docs/archive/findings.md) discusses the results. Figures are means over seeds ± one
standard error, and losses are paired differences from the baseline. A figure is bold if the 95%
interval (Student's t) of its paired difference from the baseline excludes zero. Even if nothing
differed, one figure in twenty would be bold. Overall ranks have a 95% interval.
"""
ONE_SEED = """\
One seed: nothing is bold. The errors of differences are over validation windows and do not show
how much another seed would change them."""


def main(folders: Iterable[Path], day: str) -> None:
    """Write the page: the comparisons in these folders, and what it has of others."""
    kept = read(PAGE.read_text("utf-8")) if PAGE.exists() else {}
    for folder in folders:
        comparison = read_comparison(folder)
        kept[comparison.name] = "\n".join(section(comparison, day))
    PAGE.write_text("\n".join([HEAD, *kept.values()]), encoding="utf-8")


def read(page: str) -> dict[str, str]:
    """Return the sections of a page that was written here, by the comparison's name."""
    _, *sections = page.split("\n## ")
    return {text.split("\n", 1)[0]: f"## {text}" for text in sections}


def section(comparison: ComparedRuns, day: str) -> Iterator[str]:
    """Yield what the page says of a comparison: its setting, and a table for each group.

    Raises:
        ValueError: none of its tables says which way a column is better, or no seed is finished by
            all variants.
    """
    tables = [read_exhibit(name).table for name in comparison.layouts]
    ranks_by = ((each, rank_variants(comparison, each)) for each in tables)
    layout, ranking = next((pair for pair in ranks_by if pair[1]), (None, None))
    if layout is None or ranking is None:
        raise ValueError(
            f"{comparison.name} ranks nothing: name the folder of an arena, one with a seed that "
            "all variants have finished."
        )
    table = fill_table(comparison, layout)
    ranks = {row.variant: row for row in ranking.rows}
    first, base = comparison.runs[0].summary, comparison.baseline
    seeds = ", ".join(map(str, ranking.seeds))
    yield f"## {comparison.name}\n"
    yield (
        f"{day}. {first.parameters.total:,} parameters, {first.tokens:,} tokens in {first.steps:,} "
        f"steps in {comparison.runs[0].config.train.dtype}, seed{'s' * (len(ranking.seeds) > 1)} "
        f"{seeds}.\n"
    )
    yield f"Trained on {' / '.join(machines(comparison))}.\n"
    if len(comparison.seeds) == 1:
        yield f"{ONE_SEED}\n"
    rows = sorted(table.rows, key=lambda row: ranks[row.variant].difference[0])
    for group in ranking.groups:
        loss = group == LOSS
        those = [
            (place, column)
            for place, column in enumerate(table.published.columns)
            if column.group == group and column.figure != LOSS
        ]
        yield f"**{group[0].upper()}{group[1:]}**\n"
        titles = [column.title.replace("|", "\\|") for _, column in those]
        if loss:
            final = "at equal tokens" if same_tokens(comparison) else "at the end"
            titles = ["loss", final, "at equal time", *titles, "overall rank"]
        yield f"| {' | '.join(['', *titles])} |"
        yield f"|{'---|' * (1 + len(titles))}"
        for row in rows:
            cells = [_told(row.cells[place]) for place, _ in those]
            if loss:
                cells = [*_losses(table.published.columns, row, ranks, base), *cells]
                cells.append(_rank(ranks[row.variant]))
            yield f"| {' | '.join([f'`{row.label}`', *cells])} |"
        yield ""


def _losses(
    columns: Iterable[Column], row: FilledRow, ranks: Mapping[str, RankedVariant], base: str
) -> list[str]:
    """Return a row's loss, and its differences at the end and after the same time."""
    (cell,) = (c for column, c in zip(columns, row.cells, strict=True) if column.figure == LOSS)
    loss = format_estimate(*cell.value) if cell.value else ""
    if row.variant == base:
        return [loss, "", ""]
    tokens = format_estimate(*ranks[row.variant].difference, "+")
    same_time = ranks[row.variant].same_time
    return [
        loss,
        f"**{tokens}**" if cell.is_significant else tokens,
        format_estimate(*same_time, "+") if same_time else "not measured",
    ]


def _told(cell: FilledCell) -> str:
    """Return a cell's mean ± its error; of what is the same with every seed, the value alone."""
    if cell.value is None:
        return "not measured"
    mean, error = cell.value
    exact = not error > 0 and mean == round(mean)  # of one seed the error is NaN
    told = f"{mean:,.0f}" if exact else format_estimate(mean, error)
    return f"**{told}**" if cell.is_significant else told


def _rank(row: RankedVariant) -> str:
    interval = f" ± {row.half_width:.1f}" if math.isfinite(row.half_width) else ""
    return f"{row.overall[0]:.1f}{interval}"


if __name__ == "__main__":
    main(map(Path, sys.argv[1:]), date.today().isoformat())
