"""What can go wrong in a run, and that nothing is lost by it."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from train.runs import tiny, write_text
from train.test_loop import losses, weights
from wakeful.config import Config, config_to_toml
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.run import Run
from wakeful.train import checkpoint
from wakeful.train.loop import train

LONG = {"steps": 60, "eval_every": 7, "checkpoint_every": 5}


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


def test_a_killed_run_continues_to_the_bit(text: Path, tmp_path: Path) -> None:
    config = tiny(text, train=LONG, model={"route": 'resformer(mode="learnable")'})
    whole = train(config, tmp_path / "whole")
    (tmp_path / "cut").mkdir()
    generator = random.Random(3)
    kills = sorted(generator.sample(range(2, 50), 2))
    assert_same(kill_and_resume(config, tmp_path / "cut", kills), whole)


@pytest.mark.slow
def test_fifty_killed_runs_continue_to_the_bit(text: Path, tmp_path: Path) -> None:
    config = tiny(text, train=LONG)
    whole = train(config, tmp_path / "whole")
    generator = random.Random(0)
    for trial in range(50):
        folder = tmp_path / f"cut{trial}"
        folder.mkdir()
        assert_same(kill_and_resume(config, folder, [generator.randrange(1, 66)]), whole)
        shutil.rmtree(folder)


def test_sigterm_saves_the_step_under_way(text: Path, tmp_path: Path) -> None:
    config = tiny(text, train={"steps": 2000, "checkpoint_every": 0, "eval_every": 0})
    process = start(config, tmp_path)
    wait_for_step(tmp_path / "run", 5)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped by SIGTERM" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    run = Run.open(tmp_path / "run")
    assert run.header["status"] == "stopped"
    assert checkpoint.steps(run.checkpoints) == [run.metrics()[-1]["step"]]


def test_a_second_process_is_refused(text: Path, tmp_path: Path) -> None:
    config = tiny(text, train={"steps": 2000, "checkpoint_every": 2})
    process = start(config, tmp_path)
    wait_for_step(tmp_path / "run", 3)
    with pytest.raises(WakefulError, match="another process"):
        train(Config(), tmp_path / "run", resume=True)
    process.kill()
    process.communicate()


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
            raise SafetensorError("Error while serializing: I/O error: No space left on device")
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
