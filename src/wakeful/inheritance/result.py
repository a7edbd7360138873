"""Result of an inheritance: its folder and its models."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from wakeful.config.tables import to_table
from wakeful.inheritance.outcome import InheritanceSummary, read_inheritance
from wakeful.inheritance.report import inheritance_report
from wakeful.reports.result import StoredResult
from wakeful.reports.value import Report

if TYPE_CHECKING:
    from wakeful.inheritance.untrained import UntrainedHeir
    from wakeful.loading.model import Model


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
        """A row for each evaluation of each model that was trained (an arm: an heir or a baseline):
        arm, run, step, tokens, loss, standard_error.

        Without training it is one row: the heir's at step 0, with no run.
        """
        if self.untrained is not None:
            return self.untrained.frame
        return pl.DataFrame(
            [{"arm": arm.name, **to_table(point)} for arm in self._read.arms for point in arm.curve]
        )

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json: the recipe, losses and sizes; inherit.json without training."""
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
