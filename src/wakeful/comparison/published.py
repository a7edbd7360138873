"""Published tables that a comparison may be laid out as; installed packages bring them."""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from wakeful.comparison.outcomes import Direction
from wakeful.errors import WakefulError, nearest
from wakeful.plugins import added


@dataclass(frozen=True)
class Column:
    """A figure, its heading, and how far apart equal ones may be, as a share."""

    figure: str
    title: str
    same: float = 0.05
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
    cells: dict[tuple[str, str], float | Direction]
    """By variant and figure."""
    grows: tuple[str, ...] = ()
    """Variants whose attention on BOS the paper saw grow in training."""

    def direction(self, variant: str, column: Column) -> Direction | None:
        """Return how the paper's row differs from its baseline; None where it does not say."""
        cell = self.cells.get((variant, column.figure))
        base = self.cells.get((self.baseline, column.figure))
        if variant == self.baseline or cell is None:
            return None
        if isinstance(cell, str):
            return cell
        if not isinstance(base, int | float):
            return None
        if abs(cell / base - 1) <= column.same:
            return "same"
        return "lower" if cell < base else "higher"


def layouts() -> Mapping[str, PublishedTable]:
    """Return every published table of the installed packages, by name."""
    return ChainMap(*(point.load() for point in added("layouts").values()))


def published(name: str) -> PublishedTable:
    """Return a published table.

    Raises:
        WakefulError: no installed package has one of that name.
    """
    known = layouts()
    if name not in known:
        raise WakefulError(
            f"layouts: no published table {name[:80]!r}{nearest(name, known)}"
            + ("" if known else "; no installed package brings any")
        )
    return known[name]
