"""Questions and windows dealt out among processes, played by threads, against one process."""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evaluation.models import CHOICES, LAMBADA, loaded_llama, write_lines
from wakeful.errors import WakefulError
from wakeful.evaluation.examples import read_choices, read_lambada
from wakeful.evaluation.perplexity import perplexity
from wakeful.evaluation.scores import Score
from wakeful.loading.model import Model
from wakeful.world import World

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from wakeful.evaluation.adapter import Adapter
from wakeful.evaluation.groups import TaskSet
from wakeful.evaluation.harness import Dealt, question_places, run_tasks
from wakeful.evaluation.tasks import choices_task, lambada_task

SIZE = 3


@dataclass
class Table:
    """Where threads lay what they tell each other."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(SIZE, timeout=60))
    values: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Threads(World):
    """Threads of one process as if they were processes."""

    table: Table = field(default_factory=Table)

    def gather(self, value: Any) -> list[Any]:
        self.table.barrier.wait()
        self.table.values[self.rank] = value
        self.table.barrier.wait()
        return [self.table.values[rank] for rank in range(self.size)]

    def sum(self, tensor: Tensor) -> Tensor:
        parts = self.gather(tensor)
        return torch.stack(parts).sum(0)


def on_all(work: Callable[[World], Any]) -> list[Any]:
    """Return what each of the processes makes of `work`, or the error it met."""
    table, found = Table(), {}

    def one(rank: int) -> None:
        try:
            found[rank] = work(Threads(rank=rank, size=SIZE, table=table))
        except WakefulError as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(SIZE)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return loaded_llama(tmp_path_factory.mktemp("models") / "llama", dtype=torch.float64)


def instance(kind: Any, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


class Counting(LM):
    """Answers by what was asked, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        self.asked += [request.args for request in requests]
        return [(-float(len("".join(map(str, r.args)))), r.args[1] == " a") for r in requests]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        self.asked += [request.args for request in requests]
        return [-len(request.args[0]) / 3 for request in requests]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        self.asked += [request.args for request in requests]
        return [f"{request.args[0]} é {request.args[1]}" for request in requests]


QUESTIONS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "loglikelihood": lambda n: ("c" * (n // 2), f" {'ab'[n % 2]}"),
    "loglikelihood_rolling": lambda n: ("text " * n,),
    "generate_until": lambda n: (f"go {n}", {"until": ["x"], "max_gen_toks": n}),
}


@pytest.mark.parametrize("count", [0, 2, 10])
@pytest.mark.parametrize("kind", QUESTIONS)
def test_each_question_is_asked_once_and_answered_everywhere(kind: str, count: int) -> None:
    arguments = [QUESTIONS[kind](n) for n in range(count)]
    requests = [instance(kind, *each) for each in arguments]
    models = [Counting() for _ in range(SIZE)]

    def work(world: World) -> list[Any]:
        return getattr(Dealt("m", models[world.rank], world), kind)(requests)

    assert on_all(work) == [getattr(Counting(), kind)(requests)] * SIZE
    asked = [repr(question) for one in models for question in one.asked]
    assert sorted(asked) == sorted(map(repr, arguments))


def test_questions_of_one_context_stay_together_and_the_work_is_even() -> None:
    requests = [instance("loglikelihood", "x" * (n // 4 + 50), f" {n}") for n in range(48)]
    dealt = [question_places(requests, World(rank=rank, size=SIZE)) for rank in range(SIZE)]
    contexts = [{requests[place].args[0] for place in mine} for mine in dealt]
    assert sorted(place for mine in dealt for place in mine) == list(range(48))
    assert sum(map(len, contexts)) == len(set.union(*contexts)) == 12
    work = [sum(len(requests[place].args[0]) for place in mine) for mine in dealt]
    assert max(work) < 1.1 * min(work)


def test_processes_with_different_questions_are_refused() -> None:
    def work(world: World) -> Any:
        requests = [instance("loglikelihood", "a", f" {world.rank // 2}")]
        return Dealt("m", Counting(), world).loglikelihood(requests)

    for error in on_all(work):
        assert isinstance(error, WakefulError)
        assert "the processes ask m different questions" in str(error)


def same(found: list[Score], wanted: list[Score], tolerance: float) -> None:
    assert [(s.task, s.metric, s.keys) for s in found] == [
        (s.task, s.metric, s.keys) for s in wanted
    ]
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine.values, theirs.values, rtol=tolerance)
        assert np.array_equal(mine.weights, theirs.weights)


def test_a_tasks_scores_are_those_of_one_process(model: Model, tmp_path: Path) -> None:
    lambada = read_lambada(write_lines(tmp_path / "l.jsonl", LAMBADA))
    choices = read_choices(write_lines(tmp_path / "c.jsonl", CHOICES))

    def tasks() -> TaskSet:
        return TaskSet({"lambada": lambada_task(lambada), "choices": choices_task(choices)})

    prepared = [tasks() for _ in range(SIZE)]
    wanted = run_tasks("m", Adapter(model, batch_size=2), tasks())

    def work(world: World) -> Any:
        inner = Adapter(copy.copy(model), batch_size=2)
        return run_tasks("m", Dealt("m", inner, world), prepared[world.rank])

    for found in on_all(work):
        same(found, wanted, 1e-12)


@pytest.mark.parametrize("num_sequences", [0, 4])
def test_a_perplexity_is_that_of_one_process(model: Model, num_sequences: int) -> None:
    text = "a text of some length, which is cut into windows; " * 5
    settings: dict[str, Any] = {"length": 24, "stride": 10, "num_sequences": num_sequences}
    wanted = perplexity(model, text, **settings, batch_size=3)
    for found in on_all(
        lambda world: perplexity(model, text, **settings, batch_size=3, world=world)
    ):
        same(found, wanted, 0)


def test_processes_with_different_texts_are_refused(model: Model) -> None:
    for error in on_all(
        lambda world: perplexity(model, "word " * (9 + world.rank), length=8, stride=8, world=world)
    ):
        assert isinstance(error, WakefulError)
        assert "the processes read different text for llama" in str(error)
