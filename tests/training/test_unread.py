"""Losses that stay on the device between readings, and batches that are read ahead."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from training.runs import tiny
from training.test_loop import weights
from wakeful.config.tables import TomlTable
from wakeful.data.order import Batches
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.runs.run import Run
from wakeful.training import loop
from wakeful.training.deferred import prefetch
from wakeful.training.loop import train_run
from wakeful.training.setup import Training


def item(tensor: Tensor) -> Any:
    """Return what `tolist` does, one number at a time, so that it is seen."""
    return [item(element) for element in tensor] if tensor.ndim else tensor.item()


SPARSE: TomlTable = {"steps": 11, "eval_every": 0, "checkpoint_every": 0, "log_every": 4}


class Waits(TorchDispatchMode):
    """Notes at which step a number was taken off the device."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.at = 0, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.at.append(self.step)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["torch.optim:SGD", "adamw", "orthoadam", "muon"])
def test_between_readings_nothing_waits_for_the_device(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    waits = Waits()
    steps, finish, moved = Training.accumulate_gradients, loop.finish_run, loop._optimizer_step
    counts: list[int] = []

    def gradients(*arguments: Any) -> Tensor:
        waits.step += 1
        return steps(*arguments)

    def move(optimizer: torch.optim.Optimizer, unread: Any) -> Any:
        before = len(waits.at)
        actual = moved(optimizer, unread)
        # Torch's own optimizers count their steps in tensors that stay in the processor's memory.
        own = [s["step"] for s in optimizer.state.values() if isinstance(s.get("step"), Tensor)]
        counts.append(len(waits.at) - before - len(own))
        del waits.at[before:]
        return actual

    def end(*arguments: Any) -> None:
        waits.step = -1
        finish(*arguments)

    monkeypatch.setattr(Training, "accumulate_gradients", gradients)
    monkeypatch.setattr(loop, "_optimizer_step", move)
    monkeypatch.setattr(loop, "finish_run", end)
    monkeypatch.setattr(Tensor, "tolist", lambda self: [item(element) for element in self])
    with waits:
        train_run(tiny(text, train=SPARSE, optimizer={"name": optimizer}), tmp_path / "run")
    assert {step for step in waits.at if step > 0} == {4, 8, 11}
    assert max(counts) <= 0


@pytest.mark.slow
def test_rows_and_weights_are_those_of_readings_at_every_step(text: Path, tmp_path: Path) -> None:
    task: dict[str, TomlTable] = {
        "data": {"source": "backcopy", "vocab_size": 258, "validation_fraction": 0.1},
    }
    for number, over in enumerate(({}, task)):
        rows: list[list[dict[str, Any]]] = []
        ends: list[dict[str, Tensor]] = []
        for every in (1, 4):
            config = tiny(text, train=SPARSE | {"log_every": every, "eval_every": 6}, **over)
            run = train_run(config, tmp_path / f"{number}-{every}")
            actual = [row for row in run.metrics() if row["kind"] == "train"]
            seconds = [row.pop("seconds") for row in actual]
            assert seconds == sorted(seconds)
            assert all(row.pop("tokens_per_second") > 0 for row in actual)
            rows.append(actual)
            ends.append(weights(run))
        assert rows[0] == rows[1]
        assert [row["step"] for row in rows[0]] == list(range(1, 12))
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_fault_between_readings_is_named_and_what_came_before_it_recorded(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Decoder.loss, []

    def loss(self: Decoder, *arguments: Tensor, **options: str) -> Tensor:
        value = real(self, *arguments, **options)  # pyright: ignore[reportArgumentType]
        calls.append(torch.is_grad_enabled())
        return value * math.nan if sum(calls) == 6 else value

    monkeypatch.setattr(Decoder, "loss", loss)
    config = tiny(text, train=SPARSE | {"checkpoint_every": 5})
    with pytest.raises(
        WakefulError, match=r"loss is nan at step 6, .*checkpoint of step 5 is kept"
    ):
        train_run(config, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert [row["step"] for row in run.metrics() if row["kind"] == "train"] == [1, 2, 3, 4, 5]


def test_an_optimizer_that_fails_on_what_is_not_finite_names_the_step(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: torch.optim.SGD) -> None:
        if sum(len(group["params"]) for group in self.param_groups) > 3:  # not in the trial step
            raise RuntimeError("the decomposition did not converge")

    def loss(self: Decoder, *arguments: Tensor, **options: str) -> Tensor:
        value = real(self, *arguments, **options)  # pyright: ignore[reportArgumentType]
        return value * math.nan if spoiled else value

    real, spoiled = Decoder.loss, True
    monkeypatch.setattr(Decoder, "loss", loss)
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    config = tiny(text, train=SPARSE, optimizer={"name": "torch.optim:SGD"})
    with pytest.raises(WakefulError, match="loss is nan at step 1"):
        train_run(config, tmp_path / "nan")
    spoiled = False
    with pytest.raises(RuntimeError, match="did not converge"):
        train_run(config, tmp_path / "other")


class Numbered(Batches):
    """Batches that hold their step's number."""

    def __init__(self, fails: int) -> None:
        self.fails = fails

    def batch(self, step: int) -> Tensor:
        if step == self.fails:
            raise WakefulError(f"step {step} cannot be read")
        return torch.full((2, 3), step)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_batches_come_ahead_in_order(device: str) -> None:
    def steps(fails: int = -1) -> Iterator[Tensor]:
        return prefetch(Numbered(fails), range(3, 8), torch.device(device))

    assert [int(batch[0, 0]) for batch in steps()] == [3, 4, 5, 6, 7]
    coming = steps(fails=6)
    assert [int(next(coming)[0, 0]) for _ in range(3)] == [3, 4, 5]
    with pytest.raises(WakefulError, match="step 6 cannot be read"):
        next(coming)
    assert list(prefetch(Numbered(-1), range(0), torch.device(device))) == []
