"""The verb evaluate: models, a text and examples in, a run directory with tables and a page out."""

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import transformers
from rich.markup import escape
from rich.table import Table as Grid

from wakeful.data.beginning import beginning_of
from wakeful.device import DTYPES, choose_device
from wakeful.display import Display, Silent
from wakeful.errors import WakefulError
from wakeful.evaluation.examples import Choice, Completion, read_choices, read_lambada
from wakeful.evaluation.likelihood import check_causal
from wakeful.evaluation.measures import Measures
from wakeful.evaluation.perplexity import perplexity
from wakeful.evaluation.scores import Score, tidy
from wakeful.loading.load import load_each
from wakeful.loading.model import Model
from wakeful.pages.evaluation.page import shown, write_evaluation
from wakeful.pages.evaluation.summary import method_of, summary
from wakeful.runs.run import Run, environment
from wakeful.world import World, joined

if TYPE_CHECKING:
    from lm_eval.api.task import Task

INSTALL_LM_EVAL = "pip install 'lm-eval>=0.4.13,<0.5'"
_SECONDS_BETWEEN_NOTES = 10.0


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
    report.html. Nothing is written before all models are measured. Of several processes each takes
    its share of the windows and examples; the first writes.
    """
    run = Run(out)
    transformers.logging.disable_progress_bar()
    with joined() as world:
        show = show if world.first else Silent()
        if world.first:
            run.refuse_existing("evaluate")
        if batch_size < 1:
            raise WakefulError(f"batch_size = {batch_size}: at least one is needed")
        place = choose_device(device, world)
        material = world.leader_first(lambda: _read(measures, show))
        scores: list[Score] = []
        names: dict[str, str] = {}
        for loaded in load_each(
            models, device=place, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code,
            show=show, world=world,
        ):  # fmt: skip
            names[loaded.name] = loaded.architecture
            scores += _measure(
                loaded, measures, material, show, world, bos=bos, batch_size=batch_size
            )
            del loaded

        machine = environment(place, world.size)
        if world.first:
            method = method_of(names, scores, measures, machine, bos=bos, dtype=dtype)
            with Run.create(out, "evaluate", {"models": list(models)}) as part:
                part.write_json("environment.json", machine)
                part.write_frame("evaluation.parquet", tidy(scores))
                part.write_json("summary.json", summary(names, scores, method))
                title = "Evaluation of " + ", ".join(names)
                write_evaluation(scores, part.path / "report.html", title=title, method=method)
            run.set_status("done")
    return run, _grid(scores)


def _read(measures: Measures, show: Display) -> _Material:
    """Read the text and the examples; what is wrong with them is said before a model is loaded."""
    enough = measures.length * measures.num_sequences
    text = beginning_of(measures.source, enough) if measures.source else ""
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
    loaded: Model,
    measures: Measures,
    material: _Material,
    show: Display,
    world: World,
    *,
    bos: bool,
    batch_size: int,
) -> list[Score]:
    check_causal(loaded.name, loaded.module)
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
            world=world,
        )
    if material.tasks:
        from wakeful.evaluation.adapter import asked  # noqa: PLC0415 - they need lm-eval
        from wakeful.evaluation.dealt import Dealt  # noqa: PLC0415
        from wakeful.evaluation.harness import run_tasks  # noqa: PLC0415

        model = asked(
            loaded,
            bos=bos,
            batch_size=batch_size,
            progress=_every(show, f"{loaded.name}: question"),
        )
        if world.size > 1:
            model = Dealt(loaded.name, model, world)
        scores += run_tasks(loaded.name, model, material.tasks, limit=measures.limit)
    return scores


def _every(show: Display, what: str) -> Callable[[int, int], None]:
    """Return what tells of progress, at most every ten seconds."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_NOTES:
            last = time.monotonic()
            show.note(f"{what} {done}" + (f" of {total}" if total else ""))

    return tell


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
