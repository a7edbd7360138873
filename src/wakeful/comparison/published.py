"""Published tables that a comparison may be laid out as; installed packages bring them."""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from wakeful.errors import WakefulError, nearest
from wakeful.plugins import added


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
