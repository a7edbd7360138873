"""Signals end a run cleanly, and two processes do not share one."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from training.faults import Signalling, left_by, start, wait_for_step
from training.runs import tiny
from wakeful.config.schema import Config
from wakeful.errors import Interrupted, WakefulError
from wakeful.runs import checkpoint
from wakeful.runs.run import Run
from wakeful.training.deferred import PendingSteps
from wakeful.training.loop import train_run


@pytest.mark.slow
def test_sigterm_saves_the_step_under_way_and_others_keep_out(text: Path, tmp_path: Path) -> None:
    config = tiny(text, train={"steps": 5000, "checkpoint_every": 0, "eval_every": 0})
    process = start(config, tmp_path)
    wait_for_step(tmp_path / "run", 5)
    with pytest.raises(WakefulError, match="another process is working in"):
        train_run(Config(), tmp_path / "run", resume=True)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    # One line, whatever the console did to it: what happened and how to go on.
    assert re.fullmatch(
        r"wakeful train: stopped by SIGTERM after step \d+, .*--resume .*", errors.strip()
    )
    run = Run.open(tmp_path / "run")
    assert run.header.status == "stopped"
    assert checkpoint.steps(run.checkpoints) == [run.metrics()[-1]["step"]]
    checkpoint.verify_checkpoint(checkpoint.newest_checkpoint(run.checkpoints))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_and_loses_nothing(
    text: Path, tmp_path: Path, uncut: dict[str, Any], number: signal.Signals
) -> None:
    handlers = [
        signal.getsignal(signal_number) for signal_number in (signal.SIGTERM, signal.SIGINT)
    ]
    path = tmp_path / "run"
    with pytest.raises(WakefulError, match=rf"stopped by {number.name} after step 4, .*--resume"):
        train_run(tiny(text), path, show=Signalling(number, 4))
    assert Run.open(path).header.status == "stopped"
    assert checkpoint.steps(Run.open(path).checkpoints) == [3, 4]
    assert [
        signal.getsignal(signal_number) for signal_number in (signal.SIGTERM, signal.SIGINT)
    ] == handlers
    assert left_by(train_run(Config(), path, resume=True)) == uncut


def test_a_signal_does_not_wait_until_losses_are_read(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = PendingSteps.add

    def signalled(self: PendingSteps, step: int, *rest: Any) -> None:
        add(self, step, *rest)
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(PendingSteps, "add", signalled)
    settings = {"steps": 40, "log_every": 20, "checkpoint_every": 0, "eval_every": 0}
    with pytest.raises(Interrupted, match="stopped by SIGTERM after step 5,"):
        train_run(tiny(text, train=settings), tmp_path / "run")
    assert checkpoint.steps(Run.open(tmp_path / "run").checkpoints) == [5]


def test_a_second_signal_does_not_wait(text: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_run(tiny(text), tmp_path / "run", show=Signalling(signal.SIGINT, 4, times=2))
    run = Run.open(tmp_path / "run")
    assert run.header.status == "stopped"
    assert checkpoint.steps(run.checkpoints) == [3]


def test_a_signal_in_the_last_step_lets_the_run_end_and_stops_whoever_began_it(
    text: Path, tmp_path: Path, uncut: dict[str, Any]
) -> None:
    path = tmp_path / "run"
    with pytest.raises(Interrupted, match=r"after the last step, and the run is done; read it"):
        train_run(tiny(text), path, show=Signalling(signal.SIGTERM, 8))
    assert left_by(Run.open(path)) == uncut
