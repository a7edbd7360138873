"""A report on the terminal: the headlines, what was found in short, and what to do next."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text as Line

from wakeful.reports.value import BulletList, Cell, Facts, Findings, Part, Report, Table, Text
from wakeful.terminal.plain_text import escape_controls

_LONGEST = 48
"""Characters of a row's name: a longer expression folds, so that its figures have room."""


def render_terminal(report: Report) -> RenderableType:
    """Return a report for a terminal: headlines, short sections and suggested commands."""
    lines: list[RenderableType] = [_line(headline, "bold") for headline in report.headlines]
    for part in report.brief:
        lines += _render_part(part)
    lines += [Line()] if report.steps else []
    for step in report.steps:
        lines.append(
            Line.assemble(
                "Next: ", escape_controls(step.text), ". ", (escape_controls(step.command), "cyan")
            )
        )
    return Group(*lines)


def _render_part(part: Part) -> list[RenderableType]:
    """Return a part's lines; [] for parts that a terminal does not show."""
    lines: list[RenderableType] = []
    match part:
        case Text(text, style) if style in ("", "caveat"):
            lines = [_line(text, "dim" if style else "")]
        case BulletList(entries):
            lines = [_line(f"  {line}") for line in entries]
        case Facts(entries, True):  # with `brief` True
            lines = [_grid(entries)]
        case Findings(by_model, level_names):
            for name, model_findings in by_model.items():
                lines += [Line(), _line(name, "bold")] if name else [Line()]
                lines.append(
                    _grid(
                        (finding.title, level_names[finding.level], finding.text)
                        for finding in model_findings
                    )
                )
        case Table() if part.terminal != ():  # () is a table without columns for a terminal
            lines = [Line(), _table_grid(part)]
    return lines


def _grid(rows: Iterable[tuple[str, ...]]) -> Grid:
    """Lay out rows of text side by side, the first cell of each in bold."""
    grid = Grid.grid(padding=(0, 2))
    for first, *cells in rows:
        grid.add_row(_line(first, "bold"), *map(_line, cells))
    return grid


def _table_grid(table: Table) -> Grid:
    """Lay out a table: names in the first column, folded where they are long, and figures in the
    others, at the right.
    """
    grid = Grid(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    columns = list(table.for_terminal)
    for number, (name, cells) in enumerate(columns):
        if number == 0:
            fits = all(len(cell.text) <= _LONGEST for cell in cells)
            grid.add_column(_line(name), no_wrap=fits, max_width=_LONGEST, overflow="fold")
        else:
            grid.add_column(_line(name), justify="right")
    # A table with a `kind` is too wide for a terminal with the notes under its figures.
    with_notes = not table.kind
    for row in zip(*(cells for _, cells in columns), strict=True):
        grid.add_row(*(_cell_line(cell, with_notes=with_notes) for cell in row))
    return grid


def _cell_line(cell: Cell, *, with_notes: bool) -> Line:
    """Return a cell's text, with the notes under it as further lines if they are wanted."""
    text = _line(cell.text, "bold" if cell.style == "bold" else "")
    for line in cell.under if with_notes else ():
        text.append(f"\n{escape_controls(line)}", "dim")
    return text


def _line(text: str, style: str = "") -> Line:
    return Line(escape_controls(text), style)
