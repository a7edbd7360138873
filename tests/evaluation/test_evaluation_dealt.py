"""Windows dealt out among processes, played by threads, against one process."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evaluation.models import loaded_llama
from wakeful.errors import WakefulError
from wakeful.evaluation.perplexity import perplexity
from wakeful.evaluation.scores import Score
from wakeful.loading.model import Model
from wakeful.world import World

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


def same(found: list[Score], wanted: list[Score], tolerance: float) -> None:
    assert [(s.task, s.metric, s.keys) for s in found] == [
        (s.task, s.metric, s.keys) for s in wanted
    ]
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine.values, theirs.values, rtol=tolerance)
        assert np.array_equal(mine.weights, theirs.weights)


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
