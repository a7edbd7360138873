"""The tasks that a user asks for; lm-eval is imported here, and only when there are any."""

import dataclasses
from collections.abc import Sequence

from wakeful.errors import WakefulError
from wakeful.evaluation.examples import Completion, MultipleChoice, TaskSet
from wakeful.evaluation.options import EvaluateOptions

INSTALL_LM_EVAL = "pip install 'wakeful[eval]'"


def read_tasks(
    options: EvaluateOptions,
    completions: Sequence[Completion] = (),
    choices: Sequence[MultipleChoice] = (),
) -> TaskSet:
    """Return the requested tasks: lm-eval's that `options` name, "lambada" of the user's
    `completions`, and "choices" of the user's `choices`.

    Raises:
        WakefulError: lm-eval is missing, it knows no such task, or a task's data cannot be fetched.
    """
    try:
        from wakeful.evaluation import harness  # noqa: F401, PLC0415 - fails now if lm-eval lacks a part
        from wakeful.evaluation.tasks import choices_task, lambada_task, named_tasks  # noqa: PLC0415 - only who asks needs lm-eval
    except ImportError as error:
        raise WakefulError(
            f"lm-eval, which runs these tasks, cannot be imported ({error}); install all of it "
            f"with: {INSTALL_LM_EVAL}"
        ) from error
    task_set = named_tasks(options.tasks) if options.tasks else TaskSet()
    tasks = dict(task_set.tasks)
    if completions:
        tasks["lambada"] = lambada_task(completions)
    if choices:
        tasks["choices"] = choices_task(choices)
    return dataclasses.replace(task_set, tasks=tasks)
