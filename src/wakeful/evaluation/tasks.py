"""The user's examples as lm-eval tasks, and lm-eval's own tasks by name.

The definitions have the prompts and metrics of lm-eval's `lambada_openai` and `piqa`, but take
their examples from memory: nothing is fetched.
"""

import contextlib
import dataclasses
import difflib
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import datasets
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager

from wakeful.errors import WakefulError
from wakeful.evaluation.examples import Completion, MultipleChoice, TaskSet
from wakeful.evaluation.options import with_shots

_SEED = 1234
"""Seed of few-shot examples in lm-eval's own command."""


def lambada_task(examples: Sequence[Completion]) -> Task:
    """Return the task to predict the last word of a text: accuracy of greedy decoding, and the
    perplexity of that word.
    """
    return _local_task(
        "lambada",
        examples,
        output_type="loglikelihood",
        doc_to_target=_field("target"),
        metrics={"acc": ("mean", True), "perplexity": ("perplexity", False)},
    )


def choices_task(examples: Sequence[MultipleChoice]) -> Task:
    """Return the task to choose what continues a context: accuracy by the choices' log-likelihoods
    (`acc`), and by these divided by the choices' numbers of characters (`acc_norm`).
    """
    return _local_task(
        "choices",
        examples,
        output_type="multiple_choice",
        doc_to_target=_field("answer"),
        doc_to_choice=_field("choices"),
        metrics={"acc": ("mean", True), "acc_norm": ("mean", True)},
    )


def named_tasks(tasks: Sequence[str]) -> TaskSet:
    """Return lm-eval's tasks of these names, TASK or TASK@SHOTS; of a group all its tasks.

    A name without @ leaves the number of few-shot examples to the task.

    Raises:
        WakefulError: a task does not exist or its data cannot be fetched, one task is named with
            different numbers of shots, or @SHOTS follows a task that is defined without examples.
    """
    manager = TaskManager()
    task_names = set(manager.all_tasks)
    tasks_by_name: dict[str, Task] = {}
    groups: dict[str, Group] = {}
    named: set[str] = set()
    for task_name in tasks:
        name, shots = with_shots(task_name)
        if name not in task_names:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise WakefulError(f"lm-eval has no task {name!r}{hint}")
        try:
            with quiet():
                loaded = manager.load([name])
        # Each task runs code of its own, so there is no telling what it raises.
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise WakefulError(
                f"task {name} cannot be loaded; is the Hugging Face hub reachable? "
                f"({type(error).__name__}: {reason})"
            ) from error
        for title, task in loaded["tasks"].items():  # a group has several
            task.set_fewshot_seed(_SEED)
            is_zero_shot = task.get_config("num_fewshot") == 0
            if shots and is_zero_shot:
                raise WakefulError(
                    f"task {title} is defined without few-shot examples; name it without @{shots}"
                )
            if shots is not None and not is_zero_shot:
                task.set_config(key="num_fewshot", value=shots)
            if title in tasks_by_name and _shots(tasks_by_name[title]) != _shots(task):
                raise WakefulError(
                    f"task {title} is asked for with {_shots(tasks_by_name[title])} and with "
                    f"{_shots(task)} shots"
                )
        tasks_by_name |= loaded["tasks"]
        groups |= loaded.get("groups", {})
        named.update([name] if name in groups else loaded["tasks"])  # a tag names its tasks
    return TaskSet(tasks_by_name, groups, frozenset(named))


def _shots(task: Task) -> int:
    return task.get_config("num_fewshot") or 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence lm-eval's warnings and progress bars inside the context; errors are raised."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled_level)


def _local_task(
    name: str,
    examples: Sequence[Completion | MultipleChoice],
    metrics: dict[str, tuple[str, bool]],
    **fields: Any,
) -> Task:
    """Return an lm-eval task of examples in memory, all of which are for testing.

    `metrics` maps a metric's name to its aggregation and whether higher is better. `fields` are
    further fields of lm-eval's configuration, such as the function that returns an example's
    target.
    """
    rows = [dataclasses.asdict(example) for example in examples]
    with quiet():
        return ConfigurableTask(
            config={
                "task": name,
                "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
                "test_split": "test",
                "doc_to_text": _field("context"),
                "metric_list": [
                    {"metric": metric, "aggregation": aggregation, "higher_is_better": better}
                    for metric, (aggregation, better) in metrics.items()
                ],
                **fields,
            }
        )


def _field(name: str) -> Callable[[dict[str, Any]], Any]:
    # A function and not a template: what a user's file holds is never read as one.
    return lambda row: row[name]
