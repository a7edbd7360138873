"""What models read: the beginning of a text, or the validation windows of a task."""

import numpy as np

from wakeful.data.sources import Beginning, beginning_of
from wakeful.data.tasks import TaskData, task_of
from wakeful.data.tasks.base import BOS_ID, VALIDATION_TOKENS
from wakeful.errors import WakefulError
from wakeful.loading.model import Model
from wakeful.runs.run import Run

Words = Beginning | TaskData


def words_of(source: str, num_tokens: int) -> Words:
    """Return the task that a source names, or a text read as far as `enough` tokens mostly need.

    Raises:
        WakefulError: what `task_of` and `beginning_of` raise.
    """
    task = task_of(source, imports=True)
    return beginning_of(source, num_tokens) if task is None else TaskData(task)


def own_task(loaded: Model) -> TaskData | None:
    """Return the task that a run was trained on; None of other models.

    Raises:
        WakefulError: the task is of a module that nobody has imported.
    """
    if loaded.path is None or not (loaded.path / "run.json").is_file():
        return None
    run = Run.open(loaded.path)
    task = task_of(run.config.data.source) if run.header.kind == "train" else None
    return None if task is None else TaskData(task)


def task_rows(
    loaded: Model, data: TaskData, *, length: int, num_sequences: int, bos: bool, targets: int = 0
) -> np.ndarray:
    """Return the first validation windows of a task, (num_sequences, length + targets).

    They are those of training with this length, and begin with BOS.

    Raises:
        WakefulError: the model has other tokens than the task, `bos` is off, the length is past the
            model's context, or there are fewer windows.
    """
    task = data.task
    ids = list(range(1, len(task.characters) + 1))
    if loaded.bos != BOS_ID or [loaded.plain(each) for each in task.characters] != [
        [each] for each in ids
    ]:
        raise WakefulError(
            f"{loaded.name} does not have the tokens of {task}: a task is read by models that were "
            "trained on it"
        )
    if not bos:
        raise WakefulError(f"every window of {task} begins with BOS; leave out --bos off")
    if not 2 <= length <= loaded.context:
        raise WakefulError(
            f"length = {length} must be between 2 and {loaded.name}'s context of {loaded.context} "
            "tokens"
        )
    if num_sequences * length > VALIDATION_TOKENS:
        raise WakefulError(
            f"{num_sequences} windows of {length} tokens are more than the {VALIDATION_TOKENS:,} "
            f"that {task} is validated on: ask for fewer, or for shorter ones"
        )
    return data.validation.read(np.arange(num_sequences) * length, length + targets)
