"""Result of an inheritance: its folder and its models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from wakeful.config.tables import to_table
from wakeful.inheritance.outcome import REFERENCE, Summary, read_inheritance
from wakeful.inheritance.report import inheritance_report, results_of
from wakeful.reports.result import Paged
from wakeful.reports.value import Report
from wakeful.runs.run import Run

if TYPE_CHECKING:
    from wakeful.loading.model import Model
    from wakeful.loading.sources import Source


@dataclass(frozen=True, eq=False, repr=False)
class Inheritance(Paged):
    """Heirs of a reference, what they reached, and the baselines beside them."""

    @property
    def model(self) -> "Model":
        """The last heir."""
        from wakeful.loading.load import load  # noqa: PLC0415 - Transformers takes seconds to import

        return load(self.path / self._read.heir.runs[-1])

    @property
    def frame(self) -> pl.DataFrame:
        """A row an arm and evaluation: run, step, tokens, loss, standard_error."""
        return pl.DataFrame(
            [{"arm": arm.arm, **to_table(point)} for arm in self._read.arms for point in arm.curve]
        )

    @property
    def results(self) -> pl.DataFrame:
        """One row per model: losses, paired differences with 95% intervals, sizes, tokens."""
        return results_of(self._read)

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json: the recipe, the heir's and the baselines' losses, sizes and speeds."""
        return to_table(self._read)

    @property
    def report(self) -> Report:
        """The report: heir and reference, the baselines, and the savings."""
        return inheritance_report(self.path)

    @property
    def _read(self) -> Summary:
        return read_inheritance(self.path)[0]


def with_heirs(sources: "Sequence[Source]") -> "list[Source]":
    """Return the models, in the place of an inheritance's folder those in it, none of them twice.

    Raises:
        WakefulError: an inheritance is not finished.
    """
    found: list[Source] = []
    for source in sources:
        if not (isinstance(source, str | Path) and _is_inheritance(Path(source))):
            found.append(source)
            continue
        there = [str(each) for each in found if isinstance(each, str | Path)]
        found += [each for each in _models(Path(source)) if each not in there]
    return found


def _is_inheritance(place: Path) -> bool:
    return (place / "run.json").is_file() and Run.open(place).header.kind == "inherit"


def _models(place: Path) -> Iterator[str]:
    summary, _ = read_inheritance(place)
    exported = place / REFERENCE
    yield str(exported) if exported.is_dir() else summary.recipe.reference
    for seed, _ in summary.recipe.of_seeds():
        heir = summary.heir.runs[-1] if not seed else _last_heir(place / seed)
        yield str(place / seed / heir)
        for baseline in summary.recipe.baselines:
            yield str(place / seed / baseline)


def _last_heir(place: Path) -> str:
    """Return the folder of a later seed's last heir, which parity may have come to elsewhere."""
    named = (each.name.removeprefix("heir-") for each in place.glob("heir-*"))
    depths = [int(depth) for depth in named if depth.isdecimal()]  # beside what is made of them
    return f"heir-{max(depths)}"
