"""Evaluate models: perplexity of texts, tasks, size and speed."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
from torch import nn

from wakeful.config.keywords import accept_options, options_from
from wakeful.config.reading import LENGTH
from wakeful.errors import WakefulError
from wakeful.evaluation.costs import OURS, THEIRS, check_lengths, code_of, measure_costs
from wakeful.evaluation.examples import TaskSet, read_choices, read_lambada
from wakeful.evaluation.options import EvaluateOptions
from wakeful.evaluation.perplexity import check_likelihoods, measure_perplexity
from wakeful.evaluation.report import evaluation_report, evaluation_summary, method_of
from wakeful.evaluation.task_set import read_tasks
from wakeful.loading.load import is_own_gguf, locate_model
from wakeful.loading.model import AnyTokenizer, Model
from wakeful.loading.reading import EvaluationData, open_evaluation_data
from wakeful.loading.session import choose_data, count_progress, open_session
from wakeful.loading.sources import Source, source_name
from wakeful.probes.running import as_decoder
from wakeful.reports.result import MeasuredResult, same_or_each
from wakeful.reports.value import Report
from wakeful.runs.run import Environment
from wakeful.scores import Score, scores_table
from wakeful.switches import default_torch_state
from wakeful.terminal.display import Display, DisplayFactory


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Evaluation(MeasuredResult):
    """Scores of models: perplexity, tasks, size and speed."""

    names: Mapping[str, str]
    """Each model's architecture."""
    scores: tuple[Score, ...]
    method: Mapping[str, str]
    machine: Environment
    sources: tuple[str, ...]
    reading: str = ""
    """The options by which the text was read, for the next command."""

    @property
    def frame(self) -> pl.DataFrame:
        """A row for each model, task, metric and example: key, value, weight."""
        return scores_table(self.scores)

    @property
    def summary(self) -> dict[str, Any]:
        """`models`, `scores` with errors and paired differences, and `method`, in words."""
        return evaluation_summary(self.names, self.scores, self.method)

    @property
    def report(self) -> Report:
        """All figures, and the differences from the first model's, paired by example."""
        return evaluation_report(
            self.scores, title="Evaluation of " + ", ".join(self.names), method=self.method,
            sources=self.sources, reading=self.reading,
        )  # fmt: skip

    def save(self, folder: str | Path) -> Path:
        """Write evaluation.parquet, summary.json and report.html to a new folder; return it."""
        return self.write_run(
            folder, "evaluate", self.machine, models=list(self.sources),
            files={"evaluation.parquet": self.frame},
        )  # fmt: skip


@accept_options(EvaluateOptions)
@default_torch_state()
def evaluate(
    *models: Source,
    tokenizer: AnyTokenizer | str | Path | None = None,
    display: DisplayFactory | None = None,
    options: EvaluateOptions | None = None,
    **kwargs: Any,
) -> Evaluation:
    """Measure how well models predict, and what they cost: perplexity of texts, LAMBADA, multiple
    choice, tasks of lm-eval, size and speed.

        wakeful.evaluate("smollm2", "heir", text="book.txt", num_sequences=64)
        wakeful.evaluate("smollm2", "heir", texts=["a.txt", "b.txt"], speed=[128, 1024])

    Args:
        models: names, paths, what `wakeful.load` returned, or modules in memory.
        tokenizer: of a module in memory.
        display: shows progress; None is a bar where there is a terminal.
        options: `EvaluateOptions`, whose fields are keyword arguments too.

    With `out` the run directory is written too, which must not exist; without it nothing is.

    Raises:
        WakefulError: a model, a text or a file of examples cannot be read, lm-eval is missing or
            does not know a task, an option is out of its range, or `out` exists. Nothing is
            written.
    """
    options = options_from(EvaluateOptions, kwargs, options)
    with open_session("evaluate", options, models, tokenizer, display) as run:
        material, tasks = _read_inputs(options, run.show)
        scores: list[Score] = []
        names: dict[str, str] = {}
        lengths: dict[str, str] = {}
        texts: dict[str, str] = {}
        timed: dict[str, str] = {}
        use_decoder = bool(options.speed) and any(map(_is_ours, models))
        for model in run.models():
            names[model.name] = model.architecture
            length = options.length_for(model.context)
            lengths[model.name] = f"{length} tokens every {options.stride or length}"
            model_texts = {
                name: choose_data(model, options, text) for name, text in material.items()
            }
            texts[model.name] = ", ".join(
                text.name or options.source or options.sources[name]
                for name, text in model_texts.items()
            )
            scores += _score_model(model, options, model_texts, tasks, run.show)
            if options.speed:
                scores += _score_costs(model, options, timed, run.show, use_decoder=use_decoder)
            del model
        method = method_of(
            names, scores, options, run.machine, bos=run.bos, dtype=run.dtype,
            text=same_or_each(texts), windows=same_or_each(lengths), timed=same_or_each(timed),
        )  # fmt: skip
        result = Evaluation(
            names=names, scores=tuple(scores), method=method, machine=run.machine,
            sources=tuple(source_name(source) for source in models), figures=options.figures,
            reading=options.text_flags,
        )  # fmt: skip
        run.keep(result)
    return result


def _read_inputs(
    options: EvaluateOptions, show: Display
) -> tuple[dict[str, EvaluationData], TaskSet]:
    """Return the texts and the tasks to evaluate on. A text's key becomes the `task` of its scores.

    All are read before a model is loaded, so that a missing or damaged file is found at once.

    Raises:
        WakefulError: a file cannot be read, or lm-eval is missing or does not know a task.
    """
    num_tokens = (options.length or LENGTH) * options.windows
    texts = {
        name: open_evaluation_data(source, num_tokens) for name, source in options.sources.items()
    }
    completions = read_lambada(options.lambada) if options.lambada else []
    choices = read_choices(options.choices) if options.choices else []
    tasks = TaskSet()
    if options.asks:
        show.note("preparing lm-eval's tasks")
        tasks = read_tasks(options, completions, choices)
    return texts, tasks


def _score_model(
    model: Model,
    options: EvaluateOptions,
    texts: Mapping[str, EvaluationData],
    tasks: TaskSet,
    show: Display,
) -> list[Score]:
    """Return a model's scores on the texts and on the tasks. A text's key becomes the `task` of its
    scores.

    Raises:
        WakefulError: the model gives no likelihoods, cannot be timed at the lengths that will be
            asked for, or cannot be evaluated on a text or task.
    """
    check_likelihoods(model.name, model.module)
    bos = model.starts_with_bos(options.bos)
    if options.speed:  # refuse a length now, before anything is measured
        check_lengths(model, options.speed)
    scores: list[Score] = []
    for name, data in texts.items():
        length = options.length_for(model.context)
        text_scores = measure_perplexity(
            model,
            data,
            length=length,
            stride=options.stride or length,
            num_sequences=options.windows,
            bos=bos,
            batch_size=options.batch_size,
            progress=count_progress(show, f"{model.name}: windows", model, tokens=length),
        )
        scores += [dataclasses.replace(score, task=name) for score in text_scores]
    if tasks.tasks:
        from wakeful.evaluation.harness import HarnessModel, run_tasks  # noqa: PLC0415 - needs lm-eval

        harness_model = HarnessModel(
            model,
            bos=bos,
            batch_size=options.batch_size,
            progress=partial(show.count, f"{model.name}: rows"),
        )
        scores += run_tasks(model.name, harness_model, tasks, limit=options.limit)
    return scores


def _is_ours(source: Source) -> bool:
    """Return, before a model is loaded, whether our decoder will run it: a model in memory that
    holds the decoder, or a run, an export or a GGUF file of this package.
    """
    if isinstance(source, Model | nn.Module):
        module = source.module if isinstance(source, Model) else source
        return code_of(module) == OURS
    location = locate_model(source)
    return location.kind in ("run", "export") or is_own_gguf(location)


def _score_costs(
    model: Model,
    options: EvaluateOptions,
    timed: dict[str, str],
    show: Display,
    *,
    use_decoder: bool,
) -> list[Score]:
    """Return a model's size and speed, and enter the implementation that was timed into `timed`, by
    the model's name.

    With `use_decoder`, a model of Transformers is timed as our decoder, so that all models are
    timed with one implementation. One that our decoder cannot represent is timed as it is; `timed`
    and a note say why.
    """
    timed_model = model
    timed[model.name] = code_of(model.module)
    if use_decoder and as_decoder(model.module) is None:
        try:
            timed_model = model.as_decoder_model()
            timed[model.name] = f"{OURS} in place of {type(model.module).__name__}"
        except WakefulError as error:
            timed[model.name] = f"{THEIRS}, another implementation, because {error}"
            show.note(f"{model.name}: timed with {timed[model.name]}")
    on_progress = partial(show.count, f"{model.name}: rounds of timing")
    return measure_costs(timed_model, options.speed, progress=on_progress)
