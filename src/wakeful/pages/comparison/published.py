"""Papers' tables as they were printed, to set measurements beside: one TOML file a table.

Figures are the papers' own. A row is a variant, by the name a comparison gives it; a column is a
figure of a run (`paper_table.figure`), whose paper values count as equal where they differ by no
more than the share `same`. A direction ("lower", "higher", "same") stands where no figure is at
hand.
"""

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from wakeful.errors import WakefulError
from wakeful.variants import nearest

Direction = Literal["lower", "higher", "same"]
_FOLDER = resources.files("wakeful.pages.comparison") / "published"


@dataclass(frozen=True)
class Column:
    """A figure, its heading, and how far apart equal ones may be, as a share."""

    figure: str
    title: str
    same: float


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper; cells it leaves empty are not in `cells`."""

    title: str
    note: str
    baseline: str
    columns: tuple[Column, ...]
    labels: dict[str, str]
    """Each row's words, by variant, in the paper's order."""
    cells: dict[tuple[str, str], float | Direction]
    """By variant and figure."""
    grows: tuple[str, ...] = ()
    """Variants whose attention on BOS the paper saw grow in training."""
    unjudged: tuple[str, ...] = ()
    """Variants that are shown and not judged; the note says why."""

    def direction(self, variant: str, column: Column) -> Direction | None:
        """Return how the paper's row differs from its baseline; None where it does not say."""
        cell = self.cells.get((variant, column.figure))
        base = self.cells.get((self.baseline, column.figure))
        if variant in (self.baseline, *self.unjudged) or cell is None:
            return None
        if isinstance(cell, str):
            return cell
        assert isinstance(base, int | float)
        if abs(cell / base - 1) <= column.same:
            return "same"
        return "lower" if cell < base else "higher"


def published_names() -> tuple[str, ...]:
    """Return the tables' names, sorted."""
    names = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def published(name: str) -> PublishedTable:
    """Return a table by its name.

    Raises:
        WakefulError: there is none of that name.
    """
    if name not in published_names():
        raise WakefulError(
            f"no published table {name!r}{nearest(name, published_names())}; there are "
            f"{', '.join(published_names())}"
        )
    table = tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))
    columns = tuple(
        Column(figure, entry["title"], entry["same"]) for figure, entry in table["columns"].items()
    )
    labels = {variant: row["label"] for variant, row in table["rows"].items()}
    cells = {
        (variant, column.figure): row[column.figure]
        for variant, row in table["rows"].items()
        for column in columns
        if column.figure in row
    }
    head = (table["title"], table["note"], table["baseline"])
    names = {key: tuple(table.get(key, ())) for key in ("grows", "unjudged")}
    return PublishedTable(*head, columns=columns, labels=labels, cells=cells, **names)
