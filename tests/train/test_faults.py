"""What can go wrong in a run, and that nothing is lost by it."""

import errno
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors import SafetensorError

from test_run import largest_file
from train.runs import tiny, write_text
from train.test_loop import losses, stop_after, weights
from wakeful.config import Config, config_to_toml
from wakeful.data.preparing import prepare
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.run import Run
from wakeful.train import checkpoint
from wakeful.train.loop import train
from wakeful.train.progress import Silent
from wakeful.train.restore import restore
from wakeful.train.setup import load_data

LONG = {"steps": 36, "eval_every": 7, "checkpoint_every": 5}
LONG_ROWS = 36 + 36 // 7 + 1
"""Rows of its metrics: the steps, the evaluations on the way and the last one."""


def start(config: Config, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `wakeful train` in a process of its own."""
    file = folder / "config.toml"
    file.write_text(config_to_toml(config))
    command = [sys.executable, "-m", "wakeful", "train", *(arguments or [str(file)])]
    return subprocess.Popen(
        [*command, *(() if arguments else ("--out", str(folder / "run")))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_step(run: Path, step: int) -> None:
    """Wait until a run has written the metrics of a step."""
    deadline = time.monotonic() + 60
    metrics = run / "metrics.jsonl"
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < step:
        assert time.monotonic() < deadline, "the run did not get there"
        time.sleep(0.002)


def kill_and_resume(config: Config, folder: Path, kills: list[int]) -> Run:
    """Kill a run after each number of metric rows, resume it each time, and let it end."""
    process = start(config, folder)
    for rows in kills:
        wait_for_step(folder / "run", rows)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        process = start(config, folder, "--resume", str(folder / "run"))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return Run.open(folder / "run")


def assert_same(run: Run, whole: Run) -> None:
    assert losses(run) == losses(whole)
    assert [r["step"] for r in run.metrics()] == [r["step"] for r in whole.metrics()]
    mine, theirs = weights(run), weights(whole)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name


KILLED = {
    # While checkpoints are written as often as can be, and again when the run goes on.
    "often": (
        {
            "train": {"checkpoint_every": 1, "keep_checkpoints": 1, "dtype": "bfloat16"},
            "model": {"route": 'resformer(mode="learnable")'},
        },
        [9, 24],
    ),
    # In the last evaluation, or while the figures are written.
    "late": (
        {"optimizer": {"name": "orthoadam"}, "train": {"micro_batch_size": 2}},
        [LONG_ROWS - 1],
    ),
}


@pytest.mark.parametrize("case", KILLED)
def test_a_killed_run_continues_to_the_bit(text: Path, tmp_path: Path, case: str) -> None:
    over, kills = KILLED[case]
    config = tiny(text, **{**over, "train": LONG | over.get("train", {})})
    whole = train(config, tmp_path / "whole")
    (tmp_path / "cut").mkdir()
    assert_same(kill_and_resume(config, tmp_path / "cut", kills), whole)


class Dead(BaseException):
    """Stands for SIGKILL at one exact write: nothing after it reaches the disk."""


def stop_writing(patch: pytest.MonkeyPatch, number: int, kind: str) -> list[str]:
    """Let the write number `number` of a run fail; return the names of those that were reached.

    After a kill every later one fails too, cleaning up included.
    """
    reached: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            reached.append(name)
            if len(reached) == number + 1 and kind == "full":
                raise OSError(errno.ENOSPC, "No space left on device")
            if len(reached) > number and kind == "kill":
                raise Dead
            return real(*arguments, **options)

        return call

    patch.setattr(checkpoint, "save_file", counted("save_file", checkpoint.save_file))
    patch.setattr(Path, "rename", counted("rename", Path.rename))
    patch.setattr(Path, "replace", counted("replace", Path.replace))
    patch.setattr(Path, "mkdir", counted("mkdir", Path.mkdir))
    patch.setattr(Path, "write_text", counted("write_text", Path.write_text))
    patch.setattr(Run, "append", counted("append", Run.append))
    patch.setattr(pl.DataFrame, "write_parquet", counted("parquet", pl.DataFrame.write_parquet))
    if kind == "kill":
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
    return reached


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Give what a run leaves that nothing interrupted."""
    folder = tmp_path_factory.mktemp("uncut")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAKEFUL_CACHE", str(folder / "cache"))
        run = train(tiny(write_text(folder / "text")), folder / "run")
    return left_by(run)


def left_by(run: Run) -> dict[str, Any]:
    """Return all that must not hang on interruptions: everything but times and places."""
    summary = run.read_json("summary.json")
    times = ("seconds", "tokens_per_second")
    return {
        "rows": [{k: v for k, v in row.items() if k not in times} for row in run.metrics()],
        "weights": {name: tensor.tolist() for name, tensor in weights(run).items()},
        "summary": {k: v for k, v in summary.items() if k not in (*times, "data")},
        "status": run.header["status"],
        "files": sorted(entry.name for entry in run.path.iterdir()),
        "checkpoints": checkpoint.steps(run.checkpoints),
    }


NUM_WRITES = 56
"""At least so many writes reach the disk in the run below."""
CUTS = [("full", number) for number in range(4, NUM_WRITES, 11)]
CUTS += [("kill", number) for number in range(0, NUM_WRITES, 9)]


@pytest.mark.parametrize(("kind", "number"), CUTS)
def test_a_run_cut_off_at_a_write_continues_to_the_bit(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uncut: dict[str, Any],
    kind: str,
    number: int,
) -> None:
    config, path = tiny(text), tmp_path / "run"
    load_data(config.data)
    with monkeypatch.context() as patch:
        reached = stop_writing(patch, number, kind)
        if kind == "kill":
            with pytest.raises(Dead):
                train(config, path)
        else:
            with pytest.raises(WakefulError, match="the disk is full"):
                train(config, path)
    assert len(reached) > number
    # As a user would: go on with what is there, or begin where nothing is.
    run = train(config, path, resume=path.exists())
    found = left_by(run)
    for name in run.path.glob(".*.part"):  # what a killed process could not clean up
        found["files"].remove(name.name)
    assert found == uncut


@pytest.mark.slow
def test_fifty_killed_runs_continue_to_the_bit(text: Path, tmp_path: Path) -> None:
    config = tiny(text, train=LONG)
    whole = train(config, tmp_path / "whole")
    generator = random.Random(0)
    for trial in range(50):
        folder = tmp_path / f"cut{trial}"
        folder.mkdir()
        assert_same(kill_and_resume(config, folder, [generator.randrange(1, LONG_ROWS)]), whole)
        shutil.rmtree(folder)


def test_sigterm_saves_the_step_under_way_and_others_keep_out(text: Path, tmp_path: Path) -> None:
    config = tiny(text, train={"steps": 5000, "checkpoint_every": 0, "eval_every": 0})
    process = start(config, tmp_path)
    wait_for_step(tmp_path / "run", 5)
    with pytest.raises(WakefulError, match="another process is working in"):
        train(Config(), tmp_path / "run", resume=True)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    # One line, whatever the console did to it: what happened and how to go on.
    assert re.fullmatch(
        r"wakeful train: stopped by SIGTERM after step \d+, .*--resume .*", errors.strip()
    )
    run = Run.open(tmp_path / "run")
    assert run.header["status"] == "stopped"
    assert checkpoint.steps(run.checkpoints) == [run.metrics()[-1]["step"]]
    checkpoint.verify(checkpoint.newest(run.checkpoints))


def test_an_existing_run_is_not_overwritten(text: Path, tmp_path: Path) -> None:
    run = train(tiny(text), tmp_path / "run")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(WakefulError, match="exists already"):
        train(tiny(text), tmp_path / "run")
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_resuming_on_other_text_is_refused(text: Path, tmp_path: Path) -> None:
    train(tiny(text), tmp_path / "run")
    write_text(text, documents=61)
    with pytest.raises(WakefulError, match="other data"):
        train(Config(), tmp_path / "run", resume=True)


def test_a_loss_that_is_no_number_stops_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Decoder.loss, []

    def loss(self: Decoder, *arguments: torch.Tensor, **options: str) -> torch.Tensor:
        value = real(self, *arguments, **options)  # pyright: ignore[reportArgumentType]
        calls.append(torch.is_grad_enabled())
        return value * float("nan") if sum(calls) == 5 else value

    monkeypatch.setattr(Decoder, "loss", loss)
    with pytest.raises(WakefulError, match=r"loss is nan at step 5.*training tokens \d+.*step 3"):
        train(tiny(text), tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert run.header["status"] == "stopped"
    assert checkpoint.steps(run.checkpoints) == [3]
    checkpoint.verify(checkpoint.newest(run.checkpoints))
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())


@pytest.fixture
def stopped(text: Path, tmp_path: Path) -> Run:
    """Give a finished run with the checkpoints of steps 6 and 8."""
    return train(tiny(text), tmp_path / "run")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut short", "corrupt", "missing"])
def test_a_damaged_checkpoint_is_refused_by_name(stopped: Run, name: str, damage: str) -> None:
    file = checkpoint.newest(stopped.checkpoints) / name
    content = bytearray(file.read_bytes())
    if damage == "cut short":
        file.write_bytes(content[:-7])
    elif damage == "corrupt":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    with pytest.raises(WakefulError, match=f"{name}.*{damage}.*delete") as caught:
        train(Config(), stopped.path, resume=True)
    assert "\n" not in str(caught.value)
    # The cure that the message names works.
    shutil.rmtree(file.parent)
    assert losses(train(Config(), stopped.path, resume=True)) == losses(stopped)


def test_a_checkpoint_without_manifest_is_refused(stopped: Run) -> None:
    (checkpoint.newest(stopped.checkpoints) / "manifest.json").write_text("{")
    with pytest.raises(WakefulError, match=r"no readable manifest\.json"):
        train(Config(), stopped.path, resume=True)


def test_what_a_crash_left_half_written_is_ignored(stopped: Run) -> None:
    part = stopped.checkpoints / ".step-00000009.123.part"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    with (stopped.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    before = losses(stopped)
    shutil.rmtree(stopped.checkpoints / "step-00000008")
    assert losses(train(Config(), stopped.path, resume=True)) == before
    assert not part.exists()


def test_a_checkpoint_of_another_model_is_refused(stopped: Run) -> None:
    wider = Decoder(Run.open(stopped.path).config.model.__class__(width=32, num_heads=2))
    with pytest.raises(WakefulError, match="another model"):
        checkpoint.load_model(checkpoint.newest(stopped.checkpoints), wider)


@pytest.mark.parametrize("where", ["tensors", "state", "sync"])
def test_a_full_disk_keeps_the_last_checkpoint(
    stopped: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*_: object, **__: object) -> None:
        if where == "tensors":
            raise SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            )
        raise OSError(28, "No space left on device")

    shutil.rmtree(stopped.checkpoints / "step-00000008")
    target = {"tensors": "save_file", "state": "_entry", "sync": "_sync"}[where]
    monkeypatch.setattr(checkpoint, target, full)
    with pytest.raises(WakefulError, match="disk is full"):
        train(Config(), stopped.path, resume=True)
    monkeypatch.undo()
    assert [entry.name for entry in stopped.checkpoints.iterdir()] == ["step-00000006"]
    checkpoint.verify(checkpoint.newest(stopped.checkpoints))
    header = json.loads((stopped.path / "run.json").read_text())
    assert header["status"] == "stopped"


class Signalling(Silent):
    """Sends this process a signal when a step is done, more than once if asked."""

    def __init__(self, number: signal.Signals, step: int, times: int = 1) -> None:
        self.number, self.at, self.times = number, step, times

    def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None:
        if done == self.at:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_and_loses_nothing(
    text: Path, tmp_path: Path, uncut: dict[str, Any], number: signal.Signals
) -> None:
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    path = tmp_path / "run"
    with pytest.raises(WakefulError, match=rf"stopped by {number.name} after step 4, .*--resume"):
        train(tiny(text), path, show=Signalling(number, 4))
    assert Run.open(path).header["status"] == "stopped"
    assert checkpoint.steps(Run.open(path).checkpoints) == [3, 4]
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert left_by(train(Config(), path, resume=True)) == uncut


def test_a_second_signal_does_not_wait(text: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tiny(text), tmp_path / "run", show=Signalling(signal.SIGINT, 4, times=2))
    run = Run.open(tmp_path / "run")
    assert run.header["status"] == "stopped"
    assert checkpoint.steps(run.checkpoints) == [3]


def test_a_signal_in_the_last_step_lets_the_run_end(
    text: Path, tmp_path: Path, uncut: dict[str, Any]
) -> None:
    run = train(tiny(text), tmp_path / "run", show=Signalling(signal.SIGTERM, 8))
    assert left_by(run) == uncut


def broken_step(monkeypatch: pytest.MonkeyPatch, at: int, spoil: Callable[[Any], None]) -> None:
    """Spoil a parameter right after AdamW's step number `at`."""
    real, calls = torch.optim.AdamW.step, []

    def step(self: torch.optim.AdamW, *arguments: Any) -> Any:
        result = real(self, *arguments)
        calls.append(1)
        if len(calls) == at:
            spoil(self.param_groups[0]["params"][0])
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", step)


def test_weights_that_are_no_numbers_are_never_saved(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncut: dict[str, Any]
) -> None:
    with monkeypatch.context() as patch:
        broken_step(patch, 6, lambda parameter: parameter.data[0].fill_(math.inf))
        with pytest.raises(
            WakefulError, match=r"a weight is not finite at step 6, on the batch .*of step 3 is"
        ):
            train(tiny(text, train={"eval_every": 0}), tmp_path / "run")
    assert checkpoint.steps(Run.open(tmp_path / "run").checkpoints) == [3]
    found = left_by(train(Config(), tmp_path / "run", resume=True))
    assert found["weights"] == uncut["weights"]
    assert found["summary"] == uncut["summary"]


def test_a_gradient_that_is_no_number_changes_no_weight(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncut: dict[str, Any]
) -> None:
    real, calls = Decoder.loss, []

    def loss(self: Decoder, *arguments: torch.Tensor, **options: str) -> torch.Tensor:
        value = real(self, *arguments, **options)  # pyright: ignore[reportArgumentType]
        calls.append(torch.is_grad_enabled())
        if torch.is_grad_enabled() and sum(calls) == 5:
            value.register_hook(lambda gradient: gradient * math.nan)
        return value

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "loss", loss)
        with pytest.raises(WakefulError, match=r"gradient norm is nan at step 5.*tokens \d+"):
            train(tiny(text), tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert [row["step"] for row in run.metrics() if row["kind"] == "train"] == [1, 2, 3, 4]
    assert left_by(train(Config(), tmp_path / "run", resume=True)) == uncut


def test_a_validation_loss_that_is_no_number_stops_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Decoder.loss

    def loss(self: Decoder, *arguments: torch.Tensor, **options: str) -> torch.Tensor:
        value = real(self, *arguments, **options)  # pyright: ignore[reportArgumentType]
        return value if torch.is_grad_enabled() else value * math.nan

    monkeypatch.setattr(Decoder, "loss", loss)
    with pytest.raises(WakefulError, match="the validation loss is nan after step 3"):
        train(tiny(text), tmp_path / "run")
    assert Run.open(tmp_path / "run").header["status"] == "stopped"


def test_an_absurd_learning_rate_ends_in_one_line_or_a_finite_run(
    text: Path, tmp_path: Path
) -> None:
    rates = {"lr": 1e38, "final_lr": 1e38, "initial_lr": 1e38, "warmup_steps": 0, "clip": 0.0}
    config = tiny(text, optimizer=rates | {"name": "sgd"})
    with pytest.raises(WakefulError, match=r"step \d.*(optimizer\.lr)") as caught:
        train(config, tmp_path / "run")
    assert "\n" not in str(caught.value)
    for step in checkpoint.steps(tmp_path / "run" / "checkpoints"):
        kept = restore(tmp_path / "run", step=step).decoder
        assert all(parameter.isfinite().all() for parameter in kept.parameters())


def test_a_quota_reached_while_resuming_costs_nothing(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncut: dict[str, Any]
) -> None:
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(RuntimeError, match="stop"):
            train(tiny(text), path)
    with pytest.raises(WakefulError, match="cannot be written: File too large"), largest_file(9000):
        train(Config(), path, resume=True)
    assert [entry.name for entry in (path / "checkpoints").iterdir()] == ["step-00000003"]
    assert left_by(train(Config(), path, resume=True)) == uncut


def test_a_lost_cache_is_prepared_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncut: dict[str, Any]
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(RuntimeError, match="stop"):
            train(tiny(text), tmp_path / "run")
    shutil.rmtree(tmp_path / "cache")
    assert left_by(train(Config(), tmp_path / "run", resume=True)) == uncut
    shutil.rmtree(text)
    with pytest.raises(WakefulError, match="text"):
        train(Config(), tmp_path / "run", resume=True)


def test_resuming_on_another_validation_set_is_refused(text: Path, tmp_path: Path) -> None:
    held = write_text(tmp_path / "held", documents=3, words=33)
    before = (held / "001.txt").read_text()
    own = {"validation_source": str(held), "keep_overlap": True}
    train(tiny(text, data=own), tmp_path / "run")
    (held / "001.txt").write_text(before.replace("x", "y"))
    with pytest.raises(WakefulError, match=r"other data than data\.source gives now"):
        train(Config(), tmp_path / "run", resume=True)
    (held / "001.txt").write_text(before)
    assert train(Config(), tmp_path / "run", resume=True).header["status"] == "done"


def test_resuming_on_another_split_of_prepared_data_is_refused(text: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    prepare(str(text), data, vocab_size=280, validation_fraction=0.1)
    train(tiny(text, data={"source": str(data)}), tmp_path / "run")
    shutil.rmtree(data)
    prepare(str(text), data, vocab_size=280, validation_fraction=0.1, seed=1)
    with pytest.raises(WakefulError, match=r"other data than data\.source gives now"):
        train(Config(), tmp_path / "run", resume=True)


def test_resuming_with_another_optimizer_is_refused(stopped: Run) -> None:
    file = stopped.path / "config.toml"
    file.write_text(file.read_text().replace('"adamw"', '"rmsprop"'))
    with pytest.raises(WakefulError, match="written with the optimizer AdamW, not RMSprop"):
        train(Config(), stopped.path, resume=True)


def test_a_run_that_ended_can_be_resumed_and_stays_the_same(
    text: Path, tmp_path: Path, uncut: dict[str, Any]
) -> None:
    train(tiny(text), tmp_path / "run")
    assert left_by(train(Config(), tmp_path / "run", resume=True)) == uncut
