"""Damaged checkpoints and full disks: the error names the cure, and the cure works."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from damage import largest_file
from training.faults import left_by
from training.runs import tiny
from training.test_loop import losses, stop_after
from wakeful.config.schema import Config
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.runs import checkpoint
from wakeful.runs.run import Run
from wakeful.training.loop import train_run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut short", "corrupt", "missing"])
def test_a_damaged_checkpoint_is_refused_by_name(stopped: Run, name: str, damage: str) -> None:
    file = checkpoint.newest_checkpoint(stopped.checkpoints) / name
    content = bytearray(file.read_bytes())
    if damage == "cut short":
        file.write_bytes(content[:-7])
    elif damage == "corrupt":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    with pytest.raises(WakefulError, match=f"{name}.*{damage}.*delete") as caught:
        train_run(Config(), stopped.path, resume=True)
    assert "\n" not in str(caught.value)
    # The cure that the message names works.
    shutil.rmtree(file.parent)
    assert losses(train_run(Config(), stopped.path, resume=True)) == losses(stopped)


def test_a_checkpoint_without_manifest_is_refused(stopped: Run) -> None:
    (checkpoint.newest_checkpoint(stopped.checkpoints) / "manifest.json").write_text("{")
    with pytest.raises(WakefulError, match=r"no readable manifest\.json"):
        train_run(Config(), stopped.path, resume=True)


@pytest.mark.slow
def test_what_a_crash_left_half_written_is_ignored(stopped: Run) -> None:
    part = stopped.checkpoints / ".step-00000009.123.part"
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")
    with (stopped.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    before = losses(stopped)
    shutil.rmtree(stopped.checkpoints / "step-00000008")
    assert losses(train_run(Config(), stopped.path, resume=True)) == before
    assert not part.exists()


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(stopped: Run) -> None:
    wider = Decoder(Run.open(stopped.path).config.model.__class__(width=32, num_heads=2))
    with pytest.raises(WakefulError, match="another model"):
        checkpoint.load_model(checkpoint.newest_checkpoint(stopped.checkpoints), wider)


@pytest.mark.slow
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
    target = {"tensors": "save_tensors", "state": "to_table", "sync": "_flush_to_disk"}[where]
    monkeypatch.setattr(checkpoint, target, full)
    with pytest.raises(WakefulError, match="disk is full"):
        train_run(Config(), stopped.path, resume=True)
    monkeypatch.undo()
    assert [entry.name for entry in stopped.checkpoints.iterdir()] == ["step-00000006"]
    checkpoint.verify_checkpoint(checkpoint.newest_checkpoint(stopped.checkpoints))
    header = json.loads((stopped.path / "run.json").read_text())
    assert header["status"] == "stopped"


@pytest.mark.slow
def test_a_quota_reached_while_resuming_costs_nothing(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncut: dict[str, Any]
) -> None:
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(RuntimeError, match="stop"):
            train_run(tiny(text), path)
    with pytest.raises(WakefulError, match="cannot be written: File too large"), largest_file(9000):
        train_run(Config(), path, resume=True)
    assert [entry.name for entry in (path / "checkpoints").iterdir()] == ["step-00000003"]
    assert left_by(train_run(Config(), path, resume=True)) == uncut
