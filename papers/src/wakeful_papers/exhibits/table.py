"""A published table as data: rows, columns and printed cells."""

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
    """Relative difference up to which printed figures count as equal."""
    better: Literal["", "lower", "higher"] = ""
    """The better direction of the figure; empty if rows are not ranked by it."""
    group: str = ""
    """The figure it is ranked with, such as "outliers"."""
    front: bool = False
    """True if a chart draws the loss against it."""


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper; its empty cells are not in `cells`."""

    title: str
    note: str
    baseline: str
    columns: tuple[Column, ...]
    labels: dict[str, str]
    """Each row's label by variant, in the paper's order; empty if the rows are all variants that
    were trained, by their own names."""
    cells: Mapping[tuple[str, str], float | str]
    """By variant and figure: the printed value, or a direction if the value is not known."""


def direction_of(table: PublishedTable, row: str, column: Column) -> Direction | None:
    """Return the direction in which a row differs from a table's baseline; None if it has none."""
    cell, base = (table.cells.get((name, column.figure)) for name in (row, table.baseline))
    if row == table.baseline or cell is None:
        return None
    if isinstance(cell, str):
        directions: dict[str, Direction] = {str(name): name for name in get_args(Direction)}
        if cell not in directions:
            raise WakefulError(f"{table.title}: {cell!r} must be one of {', '.join(directions)}")
        return directions[cell]
    if not isinstance(base, int | float):
        return None
    if abs(cell - base) <= column.same * abs(base):
        return "same"
    return "lower" if cell < base else "higher"
