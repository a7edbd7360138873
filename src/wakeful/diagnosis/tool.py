"""The verb diagnose: models and a text in; tables, verdicts and a page out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from wakeful.config.keywords import accept_options, options_from
from wakeful.config.reading import LENGTH
from wakeful.diagnosis.advice import advise
from wakeful.diagnosis.measure import (
    DIAGNOSIS_PASSES,
    ModelDiagnosis,
    diagnose_model,
    metrics_table,
)
from wakeful.diagnosis.options import DiagnoseOptions
from wakeful.diagnosis.report import diagnosis_report
from wakeful.diagnosis.verdict import diagnosis_summary
from wakeful.loading.model import AnyTokenizer, Model
from wakeful.loading.reading import EvaluationData, open_evaluation_data
from wakeful.loading.session import choose_data, count_progress, open_session
from wakeful.loading.sources import Source, source_name
from wakeful.reports.result import MeasuredResult, same_or_each
from wakeful.reports.value import Report
from wakeful.runs.run import Environment
from wakeful.switches import default_torch_state
from wakeful.terminal.display import Display, DisplayFactory


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Diagnosis(MeasuredResult):
    """Measurements of models on a text."""

    models: tuple[ModelDiagnosis, ...]
    method: Mapping[str, str]
    machine: Environment
    sources: tuple[str, ...]
    reading: str = ""
    """Options by which another command reads the same text."""

    @property
    def frame(self) -> pl.DataFrame:
        """Rows of `model`, `sequences` and the columns of `wakeful.probes.base.SCHEMA`."""
        return metrics_table(self.models)

    @property
    def summary(self) -> dict[str, Any]:
        """`models`: each model's figures, most of them means over layers; `method`: in words."""
        # Through JSON, so that it is what a reader of summary.json gets: lists for tuples.
        return {
            "models": [
                json.loads(json.dumps(diagnosis_summary(diagnosis))) for diagnosis in self.models
            ],
            "method": dict(self.method),
        }

    @property
    def report(self) -> Report:
        """Attention sinks, lazy layers, drained values and outliers of each model."""
        return diagnosis_report(
            self.models, method=self.method, sources=self.sources, reading=self.reading
        )

    def save(self, folder: str | Path) -> Path:
        """Write a new run directory with diagnosis.parquet (the rows), summary.json, report.html
        and the charts in the file formats of `self.figures`, if any; return the folder.
        """
        return self.write_run(
            folder, "diagnose", self.machine, models=list(self.sources),
            files={"diagnosis.parquet": self.frame},
        )  # fmt: skip


@accept_options(DiagnoseOptions)
@default_torch_state()
def diagnose(
    *models: Source,
    tokenizer: AnyTokenizer | str | Path | None = None,
    display: DisplayFactory | None = None,
    options: DiagnoseOptions | None = None,
    **kwargs: Any,
) -> Diagnosis:
    """Measure where models waste attention and channels, by the metrics of docs/metrics.md.

        wakeful.diagnose("smollm2", text="book.txt", length=256)

    Args:
        models: names, paths, what `wakeful.load` returned, or modules in memory.
        tokenizer: replaces a model's own; required for a module; may be a path.
        display: shows progress; None is a bar where there is a terminal.
        options: `DiagnoseOptions`, whose fields are keyword arguments too.

    With `out` the run directory is written too, which must not exist; without it nothing is.

    Raises:
        WakefulError: a model or the text cannot be read, the text is shorter than one sequence, an
            option is out of its range, or `out` exists. Nothing is written.
    """
    options = options_from(DiagnoseOptions, kwargs, options)
    with open_session("diagnose", options, models, tokenizer, display) as run:
        data = open_evaluation_data(
            options.source, (options.length or LENGTH) * options.num_sequences
        )
        diagnoses: list[ModelDiagnosis] = []
        texts: dict[str, str] = {}
        for model in run.models():
            model_data = choose_data(model, options, data)
            texts[model.name] = model_data.name or options.source
            diagnoses.append(_diagnose_model(model, model_data, options, run.show))
            del model  # frees its memory before the next one is loaded
        lengths = {diagnosis.name: f"{diagnosis.length} tokens" for diagnosis in diagnoses}
        method = {
            "Models": ", ".join(
                f"{diagnosis.name} ({diagnosis.architecture})" for diagnosis in diagnoses
            ),
            "Text": f"{same_or_each(texts)}, {options.num_sequences} sequences of "
            f"{same_or_each(lengths)} from its beginning",
            "BOS": run.bos,
            "Arithmetic": f"model in {run.dtype}, metrics in float32 or better",
            "Rank": "τ = 0.9, mean over sequences, then the largest over heads; lazy at or under "
            "2; exact up to 2048 tokens",
            "Entropy": "heads averaged first (the official code's); low is concentrated",
            "Kurtosis": "not excess (a Gaussian has 3), over channels, of block outputs before the "
            "final norm",
            "First-token share": "row 0, which sees only key 0, left out unless a title says so",
            "Machine": str(run.machine),
        }
        result = Diagnosis(
            models=tuple(diagnoses), method=method, machine=run.machine,
            sources=tuple(source_name(source) for source in models), reading=options.text_flags,
            figures=options.figures,
        )  # fmt: skip
        run.keep(result)
    return result


def _diagnose_model(
    model: Model, data: EvaluationData, options: DiagnoseOptions, show: Display
) -> ModelDiagnosis:
    """Diagnose one model on the text, and add advice unless the option `no_advice` is set."""
    length = options.length_for(model.context)
    sequences = data.sequences(
        model,
        length=length,
        num_sequences=options.num_sequences,
        bos=model.starts_with_bos(options.bos),
    )
    diagnosis = diagnose_model(
        model,
        sequences,
        progress=count_progress(
            show, f"{model.name}: sequences", model, tokens=length, passes=DIAGNOSIS_PASSES
        ),
    )
    diagnosis = replace(diagnosis, quantized=model.is_quantized)
    if options.no_advice:
        return diagnosis
    num_bos = int(model.starts_with_bos(options.bos))
    # `advise` puts start tokens before its windows itself.
    without_bos = [sequence[num_bos:] for sequence in sequences]
    advice = advise(model, diagnosis, without_bos, bos=options.bos, show=show)
    if advice is not None and advice.arguments and options.text_flags:
        # The suggested command reads the same text.
        advice = replace(advice, arguments=f"{advice.arguments} {options.text_flags}")
    return replace(diagnosis, advice=advice)
