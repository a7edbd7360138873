"""Runs that are killed, at any moment and at any write, continue to the bit."""

import errno
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from training.faults import LONG, LONG_ROWS, assert_same, kill_and_resume, left_by
from training.runs import tiny
from wakeful.data.preparing import load_data
from wakeful.errors import WakefulError
from wakeful.runs import checkpoint
from wakeful.runs.run import Run, disk_errors
from wakeful.training.loop import train_run


@pytest.mark.slow
def test_a_killed_run_continues_to_the_bit(text: Path, tmp_path: Path) -> None:
    """Once while it writes checkpoints as often as can be, and again in its last evaluation."""
    config = tiny(
        text,
        model={"route": 'resformer(mode="learnable")'},
        optimizer={"name": "orthoadam"},
        train=LONG | {"checkpoint_every": 1, "keep_checkpoints": 1, "dtype": "bfloat16",
                      "micro_batch_size": 2},
    )  # fmt: skip
    uninterrupted = train_run(config, tmp_path / "whole")
    (tmp_path / "cut").mkdir()
    assert_same(kill_and_resume(config, tmp_path / "cut", [9, LONG_ROWS - 1]), uninterrupted)


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
                # `append` is replaced with the `disk_errors` that stands inside it.
                inside = disk_errors(arguments[0].path) if name == "append" else nullcontext()
                with inside:
                    raise OSError(errno.ENOSPC, "No space left on device")
            if len(reached) > number and kind == "kill":
                raise Dead
            return real(*arguments, **options)

        return call

    patch.setattr(checkpoint, "save_tensors", counted("save_tensors", checkpoint.save_tensors))
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


NUM_WRITES = 56
"""At least so many writes reach the disk in the run below."""

CUTS = [("full", number) for number in range(4, NUM_WRITES, 11)]
CUTS += [("kill", number) for number in range(0, NUM_WRITES, 9)]


@pytest.mark.slow
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
                train_run(config, path)
        else:
            with pytest.raises(WakefulError, match="the disk is full"):
                train_run(config, path)
    assert len(reached) > number
    # As a user would: go on with what is there, or begin where nothing is.
    run = train_run(config, path, resume=path.exists())
    actual = left_by(run)
    for name in run.path.glob(".*.part"):  # what a killed process could not clean up
        actual["files"].remove(name.name)
    assert actual == uncut


@pytest.mark.long
def test_fifty_killed_runs_continue_to_the_bit(text: Path, tmp_path: Path) -> None:
    config = tiny(text, train=LONG)
    uninterrupted = train_run(config, tmp_path / "whole")
    generator = random.Random(0)
    for trial in range(50):
        folder = tmp_path / f"cut{trial}"
        folder.mkdir()
        assert_same(
            kill_and_resume(config, folder, [generator.randrange(1, LONG_ROWS)]), uninterrupted
        )
        shutil.rmtree(folder)
