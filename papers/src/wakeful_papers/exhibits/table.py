"""A published table as data: rows, columns and what is printed in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from wakeful.errors import WakefulError
from wakeful_papers.exhibits.outcomes import Direction


@dataclass(frozen=True)
class Column:
    """A figure and its heading."""

    figure: str
    title: str
    same: float = 0.05
    """How far apart printed figures may be that count as equal, as a share."""
    better: Literal["", "lower", "higher"] = ""
    """Which way the figure is better; empty where rows are not ranked by it."""
    group: str = ""
    """The figure it is ranked with, such as "outliers"."""
    front: bool = False
    """Whether the loss is drawn against it."""


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper; cells it leaves empty are not in `cells`."""

    title: str
    note: str
    baseline: str
    columns: tuple[Column, ...]
    labels: dict[str, str]
    """Each row's words, by variant, in the paper's order; empty where all rows that were trained
    are the table's, by their own names."""
    cells: Mapping[tuple[str, str], float | str]
    """By variant and figure: what is printed, or a word where no figure is at hand."""


def direction_of(table: PublishedTable, row: str, column: Column) -> Direction | None:
    """Return how a table's row differs from its baseline; None where it does not say."""
    cell, base = (table.cells.get((name, column.figure)) for name in (row, table.baseline))
    if row == table.baseline or cell is None:
        return None
    if isinstance(cell, str):
        known = {str(each): each for each in get_args(Direction)}
        if cell not in known:
            raise WakefulError(f"{table.title}: {cell!r} must be one of {', '.join(known)}")
        return known[cell]
    if not isinstance(base, int | float):
        return None
    if abs(cell / base - 1) <= column.same:
        return "same"
    return "lower" if cell < base else "higher"
