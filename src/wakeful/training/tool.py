"""`train`: a configuration in, a trained model in its run directory out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from wakeful.config.reading import FigureFormat
from wakeful.config.rules import check_rules
from wakeful.config.schema import TRAINED, Config, load_config
from wakeful.errors import WakefulError
from wakeful.reports.result import StoredResult, first_process_display
from wakeful.reports.value import Report
from wakeful.runs.distributed import join_processes
from wakeful.runs.run import Run as Directory
from wakeful.switches import default_torch_state
from wakeful.terminal.display import DisplayFactory
from wakeful.training.compared import read_comparison
from wakeful.training.loop import train_run as train_into
from wakeful.training.report import comparison_report

if TYPE_CHECKING:
    from wakeful.loading.model import Model


class TrainingRun(StoredResult):
    """A training run."""

    @property
    def config(self) -> Config:
        """The configuration with all of its fields."""
        return Directory(self.path).config

    @property
    def model(self) -> "Model":
        """The trained model, from its newest checkpoint."""
        from wakeful.loading.load import load  # noqa: PLC0415 - Transformers takes seconds to import

        return load(self.path)

    @property
    def frame(self) -> pl.DataFrame:
        """One row per step and evaluation: kind, step, loss, lr, tokens, seconds ..."""
        return pl.DataFrame(Directory(self.path).metrics(), infer_schema_length=None)

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json: the last validation, parameters, bytes, tokens and seconds."""
        return Directory(self.path).read_json("summary.json")

    @property
    def report(self) -> Report:
        """The validation loss, and the training loss over steps."""
        return comparison_report(read_comparison(self.path))


@default_torch_state()
def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    out: str | Path = "",
    resume: str | Path = "",
    steps: int = 0,
    figures: Sequence[FigureFormat] = (),
    display: DisplayFactory | None = None,
    **changes: Any,
) -> TrainingRun:
    """Train one model into a run directory.

        wakeful.train("cpu-tiny", model={"route": "resformer"}, train={"steps": 200})

    Args:
        config: a `Config`, a preset's name, a TOML file or a table of fields.
        out: folder to create; empty is runs/NAME.
        resume: continue the run in this folder instead, with its own configuration.
        steps: lengthen the run that is resumed to this many; 0 leaves it as long as it is.
        figures: formats to write the charts in too, into the folder figures.
        display: shows progress; None is a bar where there is a terminal.
        changes: fields in place of the configuration's, tables for its parts.

    Raises:
        WakefulError: the configuration names what does not exist or cannot be trained, the text
            cannot be read, `out` exists, `resume` holds no run or another one, memory or disk is
            full, or a loss is not finite. Files that existed before are kept.
    """
    if bool(resume) == (config is not None):
        raise WakefulError("give a configuration, or resume=... and no configuration")
    if steps and not resume:
        raise WakefulError("steps lengthens a run that is resumed; train={'steps': ...} a new one")
    if resume and (out or changes):
        raise WakefulError("a resumed run has its own folder and configuration: leave them out")
    full_config = Config() if config is None else load_config(config, **changes)
    folder = Path(resume or out or f"runs/{folder_name(full_config.name)}")
    if not resume:
        check_rules(full_config.data, TRAINED)
    with (
        join_processes() as world,
        first_process_display(display, folder.name if resume else full_config.name, world) as show,
    ):
        train_into(full_config, folder, resume=bool(resume), steps=steps, show=show)
        run = TrainingRun(folder, folder / "report.html")
        if world.first:
            run.save_figures(folder / "figures", figures)
    return run


def folder_name(name: str) -> str:
    """Return the name of a run itself, as the name of its folder below runs.

    Raises:
        WakefulError: the folder would not lie inside runs, for a name such as "../a" or ".".
    """
    if Path(name).is_absolute() or {"..", "~"} & set(Path(name).parts) or name.strip("./") == "":
        raise WakefulError(
            f"name = {name[:80]!r} is the folder's too, and runs/NAME would lie elsewhere: choose "
            "another name, or the folder with --out"
        )
    return name
