"""One head's attention over training steps, which the page plays."""

import numpy as np
import polars as pl

from wakeful.comparison.reading import TrainedRun
from wakeful.data.tasks.base import task_of
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.reports.charts import Drawing
from wakeful.reports.heads import ink, to_choose
from wakeful.runs.run import Run
from wakeful.training.records import HeadWeights, rows


def film_of(run: TrainedRun) -> Drawing:
    """Draw the first layer's first head in a run of a task that logged its attention, a frame a
    step, the last one first; tokens at which the task needs the head are marked.

    Raises:
        WakefulError: the run logged none, or what it logged is damaged.
    """
    place = run.path / HeadWeights.log
    frames = [
        row for row in rows(Run.open(run.path), HeadWeights) if (row.layer, row.head) == (0, 0)
    ]
    if not frames:
        raise WakefulError(
            f"{place} has no weights of the first head: "
            "set train.diagnose.every and train.diagnose.attention, and train again"
        )
    tokens = frames[0].tokens
    square = {(row.tokens, len(row.weights), *map(len, row.weights)) for row in frames}
    if square != {(tokens, *[len(tokens)] * (len(tokens) + 1))}:
        raise WakefulError(f"{place}: frames differ in their tokens, or are not square")
    weights = np.array([row.weights for row in frames])
    if not ((weights >= 0) & (weights <= 1.001)).all():
        raise WakefulError(f"{place}: a weight lies outside 0 to 1")
    task = task_of(run.config.data.source)
    needed = np.zeros(len(tokens), bool)
    if task is not None:
        needed = task.is_trigger(np.array([tokens]))[0]
    tokenizer = Tokenizer.load(run.path)
    letters = [ink(tokenizer.decode([each])) for each in tokens]
    labels = [
        f"{n} {letter}{' ◂' if here else ''}"
        for n, (letter, here) in enumerate(zip(["BOS", *letters[1:]], needed, strict=True))
    ]
    query, key = np.tril_indices(len(tokens))
    shown = {
        f"step {row.step:,}": pl.DataFrame({"query": query, "key": key, "value": each[query, key]})
        for row, each in zip(frames, weights, strict=True)
    }
    return to_choose(shown, labels, ("key", "query"), 14, name="at ", first=len(shown) - 1)
