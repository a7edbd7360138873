"""Papers' tables of pretrained models as they were printed, one TOML file a table.

Figures are the papers' own. A row may say which model it is: one that has this description stands
beside it.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from wakeful.errors import WakefulError
from wakeful.variants import nearest

_FOLDER = resources.files("wakeful.evaluation.pretrained")


@dataclass(frozen=True)
class Description:
    """What a pretrained model is known by."""

    model_type: str
    layers: int
    width: int
    vocabulary: int
    context: int


@dataclass(frozen=True)
class PrintedRow:
    """A model's figures in a paper: perplexity in full precision and, by scheme, quantized."""

    label: str
    parameters: str
    full: float
    quantized: Mapping[str, float]
    model: Description | None

    def ratio(self, scheme: str) -> float:
        """Return the quantized model's perplexity over the full one's."""
        return self.quantized[scheme] / self.full


@dataclass(frozen=True)
class PretrainedTable:
    """A paper's table of pretrained models."""

    title: str
    note: str
    full: str
    """The heading of the full-precision perplexity."""
    schemes: Mapping[str, str]
    """The headings of the quantized ones, by scheme."""
    rows: Sequence[PrintedRow]

    def row_of(self, model: Description | None) -> PrintedRow | None:
        """Return the row of a model; None where the table has none."""
        found = (row for row in self.rows if model is not None and row.model == model)
        return next(found, None)


def pretrained_names() -> tuple[str, ...]:
    """Return the tables' names, sorted."""
    names = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def pretrained_table(name: str) -> PretrainedTable:
    """Return a table by its name.

    Raises:
        WakefulError: there is none of that name.
    """
    if name not in pretrained_names():
        raise WakefulError(
            f"no published table of pretrained models {name!r}{nearest(name, pretrained_names())}; "
            f"there are {', '.join(pretrained_names())}"
        )
    table = tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))
    rows = [
        PrintedRow(
            row["label"], row["parameters"], row["full"],
            {scheme: row[scheme] for scheme in table["schemes"]},
            Description(**row["model"]) if "model" in row else None,
        )
        for row in table["rows"]
    ]  # fmt: skip
    return PretrainedTable(table["title"], table["note"], table["full"], table["schemes"], rows)
