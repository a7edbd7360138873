"""The verb diagnose: models and a text in, a run directory with tables and a page out."""

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from rich.table import Table as Grid

from wakeful.data.beginning import beginning_of
from wakeful.device import DTYPES, choose_device
from wakeful.display import Display, Silent
from wakeful.errors import WakefulError
from wakeful.evaluation.diagnosis import Diagnosis, diagnose, sequences_of, tidy
from wakeful.loading.load import load_each
from wakeful.pages.charts import save_chart
from wakeful.pages.diagnosis.charts import layer_charts, rank_strips, spectra, top_importance
from wakeful.pages.diagnosis.findings import findings, summary
from wakeful.pages.diagnosis.page import write_diagnosis
from wakeful.runs.run import Run, environment, machine_line
from wakeful.world import joined


def run_diagnosis(
    models: Sequence[str],
    out: Path,
    *,
    show: Display,
    text: str = "",
    data: str = "python-stdlib",
    length: int = 512,
    num_sequences: int = 4,
    bos: bool = False,
    tau: float = 0.9,
    lazy_rank: float = 2.0,
    rank_tokens: int = 2048,
    rank_seconds: float = 600.0,
    layers: Sequence[int] = (),
    heads: Sequence[int] = (0, 1, 2, 3),
    device: str = "auto",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    figures: Sequence[str] = (),
) -> tuple[Run, Grid]:
    """Diagnose models one after another and write `out`, which must not exist.

    `out` gets diagnosis.parquet (tidy rows of all models), summary.json and report.html. Nothing
    is written before all models are measured, and nothing stays if writing fails. Of several
    processes each looks at its share of the sequences; the first writes.
    """
    run = Run(out)
    transformers.logging.disable_progress_bar()
    source = text or data
    with joined() as world:
        show = show if world.first else Silent()
        if world.first:
            run.refuse_existing("diagnose")
        if num_sequences < 1:
            raise WakefulError(f"num_sequences = {num_sequences}: at least one is needed")
        place = choose_device(device, world)
        words = world.leader_first(lambda: beginning_of(source, length * num_sequences))
        diagnoses: list[Diagnosis] = []
        for loaded in load_each(
            models, device=place, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code,
            show=show, world=world,
        ):  # fmt: skip
            sequences = sequences_of(
                loaded, words, length=length, num_sequences=num_sequences, bos=bos
            )
            world.check_same(
                [loaded.name, sequences],
                f"the processes read different text for {loaded.name}: give each machine the same "
                "text and the same model",
            )
            diagnoses.append(
                diagnose(
                    loaded,
                    sequences,
                    tau=tau,
                    lazy_rank=lazy_rank,
                    rank_tokens=rank_tokens,
                    rank_seconds=rank_seconds,
                    picture_layers=layers,
                    picture_heads=heads,
                    progress=partial(_tell, show, loaded.name, num_sequences),
                    world=world,
                )
            )
            del loaded

        machine = environment(place, world.size)
        method = {
            "Models": ", ".join(f"{d.name} ({d.architecture})" for d in diagnoses),
            "Text": f"{source}, {num_sequences} sequences of {length} tokens from its beginning",
            "BOS": "before every sequence" if bos else "none",
            "Arithmetic": f"model in {dtype}, metrics in float32 or better",
            "Rank": f"τ = {tau:g}, mean over sequences, then the largest over heads; lazy at or "
            f"under {lazy_rank:g}; exact up to {rank_tokens} tokens and {rank_seconds:g} s"
            + ("" if world.size == 1 else " a process"),
            "Entropy": "heads averaged first (the official code's); low is concentrated",
            "Kurtosis": "not excess (a Gaussian has 3), over channels, of block outputs before the "
            "final norm",
            "First-token share": "row 0, which sees only key 0, left out unless a title says so",
            "Machine": machine_line(machine),
        }
        if world.first:
            _write(diagnoses, out, models, method, machine, figures)
    return run, _grid(diagnoses)


def _write(
    diagnoses: Sequence[Diagnosis],
    out: Path,
    models: Sequence[str],
    method: Mapping[str, str],
    machine: Mapping[str, Any],
    figures: Sequence[str],
) -> None:
    title = "Diagnosis of " + ", ".join(diagnosis.name for diagnosis in diagnoses)
    with Run.create(out, "diagnose", {"models": list(models), "status": "done"}) as new:
        new.write_json("environment.json", machine)
        new.write_frame("diagnosis.parquet", tidy(diagnoses))
        new.write_json(
            "summary.json",
            {
                "models": [json.loads(json.dumps(summary(d))) for d in diagnoses],
                "method": dict(method),
            },
        )
        write_diagnosis(diagnoses, new.path / "report.html", title=title, method=method)
        if figures:
            _save_figures(diagnoses, new.path / "figures", figures)


def _tell(show: Display, name: str, num_sequences: int, done: int, total: int) -> None:
    others = "" if total == num_sequences else f", the first process's share of {num_sequences}"
    show.note(f"{name}: sequence {done} of {total}{others}")


def _save_figures(diagnoses: Sequence[Diagnosis], folder: Path, formats: Sequence[str]) -> None:
    folder.mkdir()
    charts = layer_charts(diagnoses)
    rest = [
        ("head ranks", rank_strips(diagnoses)),
        ("value spectra", spectra(diagnoses)),
        ("top importance", top_importance(diagnoses)),
    ]
    for title, chart in itertools.chain(charts, rest):
        name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in title)
        for suffix in formats:
            save_chart(chart, folder / f"{name}.{suffix}")


def _grid(diagnoses: Sequence[Diagnosis]) -> Grid:
    grid = Grid.grid(padding=(0, 2))
    for diagnosis in diagnoses:
        grid.add_row(f"[bold]{diagnosis.name}[/]", "")
        for finding in findings(diagnosis):
            grid.add_row(f"  {finding.title}", finding.text)
    return grid
