"""A task read as a text, and by default by the models that were trained on it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wakeful
from training.runs import text, tiny
from wakeful.data.tasks import TaskData, task_of
from wakeful.errors import WakefulError
from wakeful.loading.load import load
from wakeful.runs.run import Run
from wakeful.training.loop import train_run

__all__ = ["text"]


@pytest.fixture
def task(text: Path) -> str:
    return f'backcopy(alphabet=9, text="{text / "000.txt"}")'


@pytest.fixture
def run(task: str, tmp_path: Path) -> Path:
    """Give a run that was trained on the task."""
    config = tiny(
        Path(), name="run", data={"source": task, "vocab_size": 4096}, train={"eval_every": 0}
    )
    return train_run(config, tmp_path / "run").path


def rows(task: str, number: int, length: int) -> np.ndarray:
    found = task_of(task)
    assert found is not None
    return TaskData(found).validation.read(np.arange(number) * length, length)


@pytest.mark.slow
def test_a_run_is_diagnosed_on_its_own_task(run: Path, task: str) -> None:
    found = wakeful.diagnose(run, length=16, num_sequences=3)
    model = load(run)
    ids = torch.from_numpy(rows(task, 3, 16))
    with torch.no_grad():
        losses = model.logits(ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
    assert found.models[0].loss == pytest.approx(-float(losses.mean()), rel=1e-5)
    assert found.method["Text"] == (
        f"{task_of(task)}, validation, 3 sequences of 16 tokens from its beginning"
    )
    assert found.method["BOS"].startswith("before every sequence")
    # Named, it is the same text; a task with other triggers has the same tokens.
    named = wakeful.diagnose(run, text=task, length=16, num_sequences=3)
    assert named.frame.equals(found.frame)
    other = wakeful.diagnose(run, text=task.replace("(", "(triggers=1, ", 1), length=16)
    assert "triggers=1" in other.method["Text"]


@pytest.mark.slow
def test_a_run_is_evaluated_and_quantized_on_its_own_task(run: Path, task: str) -> None:
    validation = Run.open(run).read_json("summary.json")["validation"]
    found = wakeful.evaluate(run, text=task, length=16)
    perplexity, over = found.scores
    assert perplexity.metric == "perplexity"
    assert perplexity.figure == pytest.approx(math.exp(validation["loss"]), rel=1e-5)
    assert perplexity.weights.sum() == validation["num_tokens"] == 16_384
    assert over.metric == "loss over the task's own"
    assert over.figure == pytest.approx(validation["excess_loss"], abs=1e-5)
    few = wakeful.evaluate(run, length=16, num_sequences=4)
    assert list(few.scores[0].values) == pytest.approx(perplexity.values[:4])
    assert f"{task_of(task)}, validation, at most 4 windows" in few.method["Text"]

    small = wakeful.quantize(run, "fine", text=task, length=16, num_sequences=4)
    assert small.damage is not None
    assert f"{task_of(task)}, validation, 4 sequences" in small.method["Text"]
    first = small.damage.measurement.perplexity()[0]
    windows = wakeful.diagnose(run, length=16, num_sequences=4).models[0]
    assert math.log(first) == pytest.approx(windows.loss, rel=1e-5)


@pytest.mark.slow
def test_what_a_task_cannot_be_read_by_is_refused(run: Path, task: str, tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"bos": "off"}, "begins with BOS; leave out --bos off"),
        ({"num_sequences": 2000}, "2000 windows of 16 tokens are more than the 16,384 that"),
        ({"length": 33}, "must be between 2 and run's context of 32"),
    ]
    for given, what in refused:
        with pytest.raises(WakefulError, match=what):
            wakeful.diagnose(run, **{"text": task, "length": 16} | given)
    with pytest.raises(WakefulError, match="stride = 8: the windows of backcopy"):
        wakeful.evaluate(run, text=task, length=16, stride=8)
    reader = train_run(tiny(tmp_path / "text", name="reader"), tmp_path / "reader").path
    with pytest.raises(WakefulError, match="reader does not have the tokens of backcopy"):
        wakeful.diagnose(reader, text=task, length=16)
    # Beside a run of a task, a run of a text reads the text.
    both = wakeful.diagnose(reader, run, length=16, num_sequences=2)
    assert both.method["Text"].startswith("reader python-stdlib; run backcopy(")
