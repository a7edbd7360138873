"""An inheritance on several processes: one's heirs to rounding, and how it goes on."""

import os
import signal
from pathlib import Path

import pytest
import torch

from inheritance.references import SMALL, reference, text, trained
from training import processes
from training.test_loop import weights
from wakeful.cli import main
from wakeful.inheritance.outcome import read_inheritance
from wakeful.runs import checkpoint
from wakeful.runs.run import Run, is_done

__all__ = ["reference", "text", "trained"]


def command(reference: Run, text: Path, out: Path, steps: int, *more: str) -> list[str]:
    return ["inherit", str(reference.path), "--text", str(text), "--out", str(out), "--steps",
            str(steps), "--layers", "2", *SMALL, *more]  # fmt: skip


def assert_same(out: Path, one: Path, name: str) -> None:
    """Assert that two heirs are one to the rounding of sums in another order."""
    for step in (0, -1):  # the one it began with, and the last
        found, expected = (checkpoint.steps(place / name / "checkpoints") for place in (out, one))
        assert found[step] == expected[step]
    mine, theirs = (weights(Run.open(place / name)) for place in (out, one))
    assert mine.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(mine[key], tensor, rtol=0, atol=2e-5)
    mine, theirs = (Run.open(place / name).header.initial for place in (out, one))
    assert mine is not None
    assert theirs is not None
    for found, expected in zip(mine["bridges"], theirs["bridges"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_two_processes_make_the_heirs_of_one(reference: Run, text: Path, tmp_path: Path) -> None:
    """With the teacher in shares, a baseline, and a round that grows."""
    more = ["--baseline", "random", "--grow", "1", "--rounds", "2",
            "--until", "budget", "--figures", "svg"]  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    running = processes.start(2, *command(reference, text, two, 4, *more))
    assert main(command(reference, text, one, 4, *more)) == 0
    status, said, errors = processes.ended(running)
    assert status == 0, errors
    assert said.count("report.html") == 1
    for name in ("heir-2", "heir-3"):
        assert_same(two, one, name)
    mine, theirs = (read_inheritance(place)[0] for place in (two, one))
    assert [arm.arm for arm in mine.arms] == [arm.arm for arm in theirs.arms]
    for arm, other in zip(mine.arms, theirs.arms, strict=True):
        assert arm.curve[-1].loss == pytest.approx(other.curve[-1].loss, rel=1e-5)
    assert Run.open(two).header.status == "done"
    for place in (two, two / "heir-2"):
        assert Run.open(place).read_json("environment.json")["processes"] == 2
    assert list((two / "figures").glob("*.svg"))


@pytest.mark.slow
def test_a_killed_process_ends_all_and_another_number_goes_on(
    reference: Run, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    running = processes.start(
        2, *command(reference, text, out, 40, "--train.checkpoint_every", "5")
    )
    processes.wait_for_rows(out / "heir-2", 7)
    os.kill(processes.workers(running)[1], signal.SIGKILL)
    status, _, errors = processes.ended(running)
    assert status == 1
    (line,) = processes.error_lines(errors, "inherit")
    assert "another process of this run is gone" in line
    assert f"continue with: torchrun [as before] -m wakeful inherit --resume {out}" in line
    assert Run.open(out).header.status == "stopped"
    assert not is_done(out / "heir-2")
    assert main(["inherit", "--resume", str(out)]) == 0
    assert is_done(out)
    steps = [row["step"] for row in Run.open(out / "heir-2").metrics() if row["kind"] == "train"]
    assert steps == list(range(1, 41))
    one = tmp_path / "one"
    assert main(command(reference, text, one, 40, "--train.checkpoint_every", "5")) == 0
    mine, theirs = (read_inheritance(place)[0].arms[0].curve[-1].loss for place in (out, one))
    assert mine == pytest.approx(theirs, rel=1e-4)
