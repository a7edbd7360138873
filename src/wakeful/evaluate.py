"""The verb evaluate: models, a text and examples in, a run directory with tables and a page out."""

import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from rich.markup import escape
from rich.table import Table as Grid

from wakeful.data.sources import read_documents
from wakeful.errors import WakefulError
from wakeful.evaluation.examples import Choice, Completion, read_choices, read_lambada
from wakeful.evaluation.likelihood import check_causal
from wakeful.evaluation.perplexity import check_sizes, perplexity
from wakeful.evaluation.scores import Score, difference, tidy
from wakeful.hf.pretrained import Loaded, load
from wakeful.report.evaluation import shown, write_evaluation
from wakeful.run import Run, environment
from wakeful.train.progress import Display
from wakeful.train.setup import DTYPES, choose_device

if TYPE_CHECKING:
    from lm_eval.api.task import Task

INSTALL_LM_EVAL = "pip install 'lm-eval>=0.4.13,<0.5'"
_CHARACTERS_A_TOKEN = 64
"""More than any tokenizer averages: enough text is read and no more."""
_SECONDS_BETWEEN_NOTES = 10.0


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What to measure; a file, text or name that is empty is not measured."""

    text: str = ""
    data: str = ""
    length: int = 512
    stride: int = 0
    num_sequences: int = 0
    lambada: str = ""
    choices: str = ""
    labels: str = ""
    tasks: Sequence[str] = ()
    limit: int = 0

    def __post_init__(self) -> None:
        default = type(self)
        if self.text and self.data:
            raise WakefulError("text and data both name a text; give one")
        if not self.source and not self.asks:
            raise WakefulError("nothing to measure: give --text, --lambada, --choices or --tasks")
        for name in ("length", "stride", "num_sequences"):
            if not self.source and getattr(self, name) != getattr(default, name):
                raise WakefulError(f"{name} is for a text, and none is given; add --text or --data")
            if getattr(self, name) < 0:
                raise WakefulError(f"{name} = {getattr(self, name)} must not be negative")
        check_sizes(length=self.length, stride=self.stride or self.length)
        if self.labels and not self.choices:
            raise WakefulError("labels are for --choices, and none are given")
        if self.limit and not self.asks:
            raise WakefulError("limit is for examples; a text is shortened by --num_sequences")
        if self.limit < 0:
            raise WakefulError(f"limit = {self.limit} must not be negative; 0 takes all examples")

    @property
    def source(self) -> str:
        """The text to measure perplexity on."""
        return self.text or self.data

    @property
    def asks(self) -> bool:
        """Whether lm-eval is needed."""
        return bool(self.lambada or self.choices or self.tasks)


@dataclass(frozen=True)
class _Material:
    """What was read before any model was loaded."""

    text: str
    tasks: Mapping[str, "Task"]


def run_evaluation(
    models: Sequence[str],
    out: Path,
    measures: Measures,
    *,
    show: Display,
    bos: bool = False,
    batch_size: int = 4,
    device: str = "auto",
    dtype: str = "float32",
    trust_remote_code: bool = False,
) -> tuple[Run, Grid]:
    """Evaluate models one after another and write `out`, which must not exist.

    `out` gets evaluation.parquet (a row for each example, metric and model), summary.json and
    report.html. Nothing is written before all models are measured.
    """
    run = Run(out)
    run.refuse_existing()
    if batch_size < 1:
        raise WakefulError(f"batch_size = {batch_size}: at least one is needed")
    place = choose_device(device)
    transformers.logging.disable_progress_bar()
    material = _read(measures, show)
    scores: list[Score] = []
    names: dict[str, str] = {}
    for source in models:
        show.note(f"loading {source}")
        loaded = load(
            source, device=place, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code
        )
        if loaded.name in names:
            raise WakefulError(f"two models are called {loaded.name!r}; rename one")
        names[loaded.name] = loaded.architecture
        scores += _measure(loaded, measures, material, show, bos=bos, batch_size=batch_size)
        del loaded

    machine = environment(place)
    method = _method(names, scores, measures, machine, bos=bos, dtype=dtype)
    with Run.create(out, "evaluate", {"models": list(models)}) as part:
        part.write_json("environment.json", machine)
        part.write_frame("evaluation.parquet", tidy(scores))
        part.write_json("summary.json", _summary(names, scores, method))
        title = "Evaluation of " + ", ".join(names)
        write_evaluation(scores, part.path / "report.html", title=title, method=method)
    run.set_status("done")
    return run, _grid(scores)


def _read(measures: Measures, show: Display) -> _Material:
    """Read the text and the examples; what is wrong with them is said before a model is loaded."""
    text = _text(measures) if measures.source else ""
    completions = read_lambada(measures.lambada) if measures.lambada else []
    choices = read_choices(measures.choices, measures.labels) if measures.choices else []
    tasks: dict[str, Task] = {}
    if measures.asks:
        show.note("preparing lm-eval's tasks")
        tasks = _tasks(completions, choices, measures.tasks)
    return _Material(text, tasks)


def _tasks(
    completions: Sequence[Completion], choices: Sequence[Choice], named: Sequence[str]
) -> dict[str, "Task"]:
    if importlib.util.find_spec("lm_eval") is None:
        raise WakefulError(
            f"lm-eval, which runs these tasks, is not installed; install it with: {INSTALL_LM_EVAL}"
        )
    try:
        from wakeful.evaluation import adapter, harness  # noqa: F401, PLC0415 - all of it is there?
        from wakeful.evaluation.tasks import (  # noqa: PLC0415 - only who asks needs lm-eval
            choices_task,
            lambada_task,
            named_tasks,
        )
    except ImportError as error:
        raise WakefulError(
            f"lm-eval cannot be imported ({error}); install all of it with: {INSTALL_LM_EVAL}"
        ) from error
    tasks = named_tasks(named) if named else {}
    if completions:
        tasks["lambada"] = lambada_task(completions)
    if choices:
        tasks["choices"] = choices_task(choices)
    return tasks


def _measure(
    loaded: Loaded,
    measures: Measures,
    material: _Material,
    show: Display,
    *,
    bos: bool,
    batch_size: int,
) -> list[Score]:
    check_causal(loaded.name, loaded.model)
    if bos and loaded.bos is None:
        raise WakefulError(f"{loaded.name} has no BOS token; leave out --bos")
    scores: list[Score] = []
    if measures.source:
        scores += perplexity(
            loaded,
            material.text,
            length=measures.length,
            stride=measures.stride or measures.length,
            num_sequences=measures.num_sequences,
            bos=bos,
            batch_size=batch_size,
            progress=_every(show, f"{loaded.name}: window"),
        )
    if material.tasks:
        from wakeful.evaluation.adapter import asked  # noqa: PLC0415 - they need lm-eval
        from wakeful.evaluation.harness import run_tasks  # noqa: PLC0415

        model = asked(
            loaded,
            bos=bos,
            batch_size=batch_size,
            progress=_every(show, f"{loaded.name}: question"),
        )
        scores += run_tasks(loaded.name, model, material.tasks, limit=measures.limit)
    return scores


def _text(measures: Measures) -> str:
    enough = _CHARACTERS_A_TOKEN * measures.length * measures.num_sequences or math.inf
    parts: list[str] = []
    size = 0
    for document in read_documents(measures.source):
        parts.append(document.text)
        size += len(document.text)
        if size >= enough:
            break
    text = "\n".join(parts)
    return text if enough == math.inf else text[: int(enough)]


def _every(show: Display, what: str) -> Callable[[int, int], None]:
    """Return what tells of progress, at most every ten seconds."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_NOTES:
            last = time.monotonic()
            show.note(f"{what} {done}" + (f" of {total}" if total else ""))

    return tell


def _method(
    names: Mapping[str, str],
    scores: Sequence[Score],
    measures: Measures,
    machine: Mapping[str, Any],
    *,
    bos: bool,
    dtype: str,
) -> dict[str, str]:
    method = {
        "Models": ", ".join(f"{name} ({kind})" for name, kind in names.items()),
        "BOS": "one before every window and every context" if bos else "none",
        "Arithmetic": f"model in {dtype}, log-likelihoods in float32 or better",
    }
    if measures.source:
        counts = "; ".join(
            f"{score.model} {len(score.keys)} windows, {score.weights.sum():,.0f} tokens counted"
            for score in scores
            if (score.task, score.metric) == ("text", "perplexity")
        )
        part = (
            f"at most {measures.num_sequences} windows" if measures.num_sequences else "all of it"
        )
        stride = measures.stride or measures.length
        method["Text"] = (
            f"{measures.source}, {part}, windows of {measures.length} tokens every {stride}, each "
            f"token but the first counted once: {counts}"
        )
    for task in dict.fromkeys(score.task for score in scores if score.task != "text"):
        count = max(len(score.keys) for score in scores if score.task == task)
        files = {"lambada": measures.lambada, "choices": measures.choices}
        source = files.get(task)
        method[f"Task {task}"] = (
            f"{source}, {count} examples, none shown before"
            if source
            else f"lm-eval's own definition, {count} examples"
        )
    if measures.asks:
        method["lm-eval"] = metadata.version("lm-eval")
    method["Errors"] = (
        "one standard error over windows or examples; differences are paired where both models "
        "had the same ones"
    )
    method["Machine"] = (
        f"{machine['device_name']}, {machine['threads']} threads; torch {machine['torch']}, "
        f"Transformers {machine['transformers']}, wakeful {machine['wakeful']}"
    )
    return method


def _summary(
    names: Mapping[str, str], scores: Sequence[Score], method: Mapping[str, str]
) -> dict[str, Any]:
    first = next(iter(names))
    baseline = {(s.task, s.metric): s for s in scores if s.model == first}
    differences = []
    for score in scores:
        other = baseline.get((score.task, score.metric))
        paired = difference(score, other) if other and other is not score else None
        if paired is not None:
            differences.append(
                {"model": score.model, "baseline": first, "task": score.task,
                 "metric": score.metric, "difference": _finite(paired[0]),
                 "standard_error": _finite(paired[1])}
            )  # fmt: skip
    return {
        "models": [
            {
                "model": name,
                "architecture": kind,
                "scores": [
                    {"task": s.task, "metric": s.metric, "value": _finite(s.figure),
                     "standard_error": _finite(s.error), "examples": len(s.keys),
                     "higher_is_better": s.higher_is_better}
                    for s in scores if s.model == name
                ],
            }
            for name, kind in names.items()
        ],
        "differences": differences,
        "method": dict(method),
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _grid(scores: Sequence[Score]) -> Grid:
    names, rows = shown(scores)
    grid = Grid(box=None, padding=(0, 2, 0, 0))
    for heading in ("", *names):
        grid.add_column(escape(heading), justify="right" if heading else "left")
    for row in rows:
        cells = [cell.value + (f"  [dim]{cell.difference}[/]" if cell.difference else "")
                 for cell in row.cells]  # fmt: skip
        grid.add_row(escape(row.title), *cells)
    return grid
