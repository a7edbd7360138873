"""Result of an inheritance: its folder and its models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from wakeful.config.tables import to_table
from wakeful.inheritance.outcome import REFERENCE, InheritanceSummary, read_inheritance
from wakeful.inheritance.report import inheritance_report
from wakeful.reports.result import StoredResult
from wakeful.reports.value import Report
from wakeful.runs.run import Run

if TYPE_CHECKING:
    from wakeful.inheritance.untrained import UntrainedHeir
    from wakeful.loading.model import Model
    from wakeful.loading.sources import Source


@dataclass(frozen=True, eq=False, repr=False)
class Inheritance(StoredResult):
    """Heirs of a reference and the baselines beside them, with their losses."""

    untrained: "UntrainedHeir | None" = None
    """With `heal.by = "none"`: heir and reference in memory, their loss in each window, the cost of
    the dropped layers. None where heirs were trained; their figures are in the folder."""

    @property
    def model(self) -> "Model":
        """The last heir."""
        if self.untrained is not None:
            return self.untrained.model
        from wakeful.loading.load import load  # noqa: PLC0415 - Transformers takes seconds to import

        return load(self.path / self._read.heir.runs[-1])

    @property
    def frame(self) -> pl.DataFrame:
        """One row per arm and evaluation: arm, run, step, tokens, loss, standard_error.

        Without training each arm has one, at step 0, and no run.
        """
        if self.untrained is not None:
            return self.untrained.frame
        return pl.DataFrame(
            [{"arm": arm.arm, **to_table(point)} for arm in self._read.arms for point in arm.curve]
        )

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json: the recipe, losses, sizes and speeds; inherit.json without training."""
        return to_table(self._read) if self.untrained is None else self.untrained.summary

    @property
    def report(self) -> Report:
        """The report: heir and reference, the baselines, and the savings."""
        if self.untrained is not None:
            return self.untrained.report
        return inheritance_report(self.path)

    @property
    def _read(self) -> InheritanceSummary:
        return read_inheritance(self.path)[0]


def with_heirs(sources: "Sequence[Source]") -> "list[Source]":
    """Return the models, each inheritance replaced by the models in its folder, without repeats.

    Raises:
        WakefulError: an inheritance is not finished.
    """
    models: list[Source] = []
    for source in sources:
        if isinstance(source, str | Path) and _is_inheritance(Path(source)):
            paths = {str(model) for model in models if isinstance(model, str | Path)}
            models += [path for path in _models(Path(source)) if path not in paths]
        else:
            models.append(source)
    return models


def _is_inheritance(folder: Path) -> bool:
    return (folder / "run.json").is_file() and Run.open(folder).header.kind == "inherit"


def _models(folder: Path) -> Iterator[str]:
    """Yield the paths, or names, of an inheritance's reference and of each seed's last heir and
    baselines.
    """
    summary, _ = read_inheritance(folder)
    exported = folder / REFERENCE
    yield str(exported) if exported.is_dir() else summary.recipe.reference
    for seed, _ in summary.recipe.of_seeds():
        heir = summary.heir.runs[-1] if not seed else _last_heir(folder / seed)
        yield str(folder / seed / heir)
        for baseline in summary.recipe.baselines:
            yield str(folder / seed / baseline)


def _last_heir(folder: Path) -> str:
    """Return the folder name of the deepest heir of a later seed, which may have reached parity at
    another depth than the first.
    """
    names = (path.name.removeprefix("heir-") for path in folder.glob("heir-*"))
    depths = [int(depth) for depth in names if depth.isdecimal()]  # not heir-4-quantized, say
    return f"heir-{max(depths)}"
