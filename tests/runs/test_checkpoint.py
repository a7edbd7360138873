"""Checkpoints: whole or not there, and never believed unless they verify."""

import contextlib
import errno
import hashlib
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_run import largest_file
from torch import nn

from wakeful.errors import WakefulError
from wakeful.optim import build_optimizer
from wakeful.optim.build import BUILDERS
from wakeful.runs import checkpoint

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


class Tied(nn.Module):
    """A few parameters, two names of which are one tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def trained(
    steps: int, *, seed: int = 0, name: str = "adamw"
) -> tuple[Tied, torch.optim.Optimizer]:
    """Return a model after some steps, with its optimizer."""
    model = Tied(seed)
    optimizer = build_optimizer(name, model.named_parameters(), lr=0.01, weight_decay=0.1)
    for step in range(steps):
        advance(model, optimizer, step)
    return model, optimizer


def advance(model: Tied, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = model.middle(model.embed(torch.tensor([step % 6, 1])))
    optimizer.zero_grad()
    model.head(x).square().sum().backward()
    optimizer.step()


def save(folder: Path, step: int, *, keep: int = 2, name: str = "adamw") -> Path:
    progress = checkpoint.RunProgress(step, 10 * step, 0.5)
    return checkpoint.save_checkpoint(folder, *trained(step, name=name), progress, keep=keep)


def assert_whole(folder: Path, step: int) -> None:
    """Check that the newest checkpoint is that of a step and holds that step's weights."""
    newest = checkpoint.newest_checkpoint(folder)
    assert newest.name == f"step-{step:08d}"
    model = Tied(9)
    checkpoint.load_model(newest, model)
    for name, tensor in trained(step)[0].state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    optimizer = build_optimizer("adamw", model.named_parameters(), lr=0.01, weight_decay=0.1)
    assert checkpoint.load_optimizer(newest, optimizer).step == step


def test_a_checkpoint_says_how_far_the_run_had_come(tmp_path: Path) -> None:
    found = save(tmp_path, 3)
    state = json.loads((found / "state.json").read_text())
    optimizer = trained(1, seed=1)[1]
    assert checkpoint.load_optimizer(found, optimizer) == checkpoint.RunProgress(3, 30, 0.5)
    state["progress"]["tokens"] = -1
    (found / "state.json").write_text(json.dumps(state))
    with pytest.raises(WakefulError, match=r"state\.json: .*how far .*tokens=-1"):
        checkpoint.load_optimizer(found, optimizer)


# OrthoAdam wants the names of a decoder's weights; it resumes in test_loop.py.
@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "orthoadam"])
def test_a_restored_optimizer_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    model, optimizer = trained(3, name=name)
    found = save(tmp_path, 3, name=name)
    again, other = trained(1, seed=1, name=name)
    checkpoint.load_model(found, again)
    assert checkpoint.load_optimizer(found, other) == checkpoint.RunProgress(3, 30, 0.5)
    assert again.head.weight is again.embed.weight
    for step in (3, 4):
        advance(model, optimizer, step)
        advance(again, other, step)
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


def test_restored_tensors_begin_where_torch_lets_its_own_begin(tmp_path: Path) -> None:
    """Products of matrices that begin elsewhere may differ in their last bit."""
    found = save(tmp_path, 3)
    _, optimizer = trained(1, seed=1)
    checkpoint.load_optimizer(found, optimizer)
    restored = [each for state in optimizer.state.values() for each in state.values()]
    assert len(restored) == 9  # three of each parameter
    assert {each.data_ptr() % 64 for each in restored} == {0}


def test_what_is_written_is_safetensors_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pickle")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (torch, "load"), (torch, "save"),
                        (pickle, "Unpickler"), (pickle, "dump")):  # fmt: skip
        monkeypatch.setattr(owner, name, refuse)
    found = save(tmp_path, 2)
    assert sorted(entry.name for entry in found.iterdir()) == sorted(FILES)
    manifest = json.loads((found / "manifest.json").read_text())
    for file, facts in manifest.items():
        content = (found / file).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert set(manifest) == set(FILES) - {"manifest.json"}
    assert_whole(tmp_path, 2)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep=3)
    assert checkpoint.steps(tmp_path) == [3, 4, 5]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        f"step-{step:08d}" for step in (3, 4, 5)
    ]
    # Steps are numbers, not names: nine digits come after eight.
    (tmp_path / "step-100000000").mkdir()
    assert checkpoint.steps(tmp_path)[-1] == 100_000_000
    with pytest.raises(WakefulError, match="holds no checkpoint"):
        checkpoint.newest_checkpoint(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("pristine"), 2)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_flipped_bit_is_found(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES[:3]))
    content = bytearray((pristine / name).read_bytes())
    place = data.draw(st.integers(0, 8 * len(content) - 1))
    content[place // 8] ^= 1 << place % 8
    with (
        damaged(pristine, name, bytes(content)) as copy,
        pytest.raises(WakefulError, match=f"{name} is corrupt.*delete"),
    ):
        checkpoint.verify_checkpoint(copy)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shortened_file_is_found(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    content = (pristine / name).read_bytes()
    end = data.draw(st.integers(0, len(content) - 1))
    with (
        damaged(pristine, name, content[:end]) as copy,
        pytest.raises(WakefulError, match=r"is cut short|no readable manifest"),
    ):
        checkpoint.load_model(copy, Tied(0))


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"model.safetensors": 3}', "[" * 99_999])
def test_a_manifest_of_something_else_is_refused(pristine: Path, manifest: str) -> None:
    with (
        damaged(pristine, "manifest.json", manifest.encode()) as copy,
        pytest.raises(WakefulError, match=r"no readable manifest\.json; delete"),
    ):
        checkpoint.verify_checkpoint(copy)


@contextlib.contextmanager
def damaged(pristine: Path, name: str, content: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(pristine, Path(folder) / pristine.name))
        (copy / name).write_bytes(content)
        yield copy


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs, no cleaning up either."""


def failing(
    patch: pytest.MonkeyPatch, number: int, error: Callable[[], BaseException]
) -> list[str]:
    """Make the write number `number` of a checkpoint fail; return the writes that were reached."""
    reached: list[str] = []

    def counted(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            reached.append(name)
            if len(reached) == number + 1:
                raise error()
            return real(*arguments, **options)

        return call

    patch.setattr(checkpoint, "save_tensors", counted("save_tensors", checkpoint.save_tensors))
    for owner, name in (
        (Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (os, "fsync"), (os, "open"),
    ):  # fmt: skip
        patch.setattr(owner, name, counted(name, getattr(owner, name)))
    return reached


WRITES = 21
"""Calls that one checkpoint makes: folders, files, flushes and the final name."""


@pytest.mark.parametrize("number", range(WRITES))
def test_a_disk_full_at_any_write_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(tmp_path, 1, keep=1)
    with monkeypatch.context() as patch:
        failing(patch, number, lambda: OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(WakefulError, match=r"disk is full: .*step-00000002.*free some space"):
            save(tmp_path, 2, keep=1)
    named = [entry.name for entry in tmp_path.iterdir()]
    assert all(name.startswith("step-") for name in named)
    assert_whole(tmp_path, checkpoint.steps(tmp_path)[-1])
    save(tmp_path, 2, keep=1)
    assert_whole(tmp_path, 2)


@pytest.mark.parametrize("number", range(WRITES))
def test_a_kill_at_any_write_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(tmp_path, 1, keep=1)
    with monkeypatch.context() as patch:
        failing(patch, number, Killed)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            save(tmp_path, 2, keep=1)
    step = checkpoint.steps(tmp_path)[-1]
    assert_whole(tmp_path, step)
    save(tmp_path, 3, keep=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000003"]
    assert_whole(tmp_path, 3)


def test_those_were_all_the_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        reached = failing(patch, 99, Killed)
        save(tmp_path, 1)
    # A full disk must be met at each, the last of them after the new name is there.
    assert len(reached) == WRITES
    assert reached[-3:] == ["rename", "open", "fsync"]


def test_a_kill_while_old_checkpoints_are_removed_costs_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    assert_whole(tmp_path, 2)
    save(tmp_path, 3)
    assert checkpoint.steps(tmp_path) == [2, 3]


def test_a_checkpoint_past_the_largest_file_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(WakefulError, match="cannot be written: File too large"), largest_file(300):
        save(tmp_path, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
    assert_whole(tmp_path, 1)


def test_another_optimizer_or_model_is_refused_before_anything_is_loaded(pristine: Path) -> None:
    model, optimizer = trained(1, name="muon")
    with pytest.raises(WakefulError, match="written with the optimizer AdamW, not MuonAdamW"):
        checkpoint.load_optimizer(pristine, optimizer)
    other = nn.Linear(4, 6)
    before = other.weight.clone()
    with pytest.raises(WakefulError, match=r"is of another model: .* is in only one of the two"):
        checkpoint.load_model(pristine, other)
    assert torch.equal(other.weight, before)
    model.middle = nn.Linear(4, 5)
    with pytest.raises(WakefulError, match=r"'middle.weight' has shape \(4, 4\) there and \(5, 4"):
        checkpoint.load_model(pristine, model)
