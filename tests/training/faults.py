"""Helpers of the tests of faults: runs that are killed, stopped or left alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from training.runs import tiny, write_text
from training.test_loop import losses, weights
from wakeful.config.schema import Config, config_to_toml
from wakeful.runs import checkpoint
from wakeful.runs.run import Run
from wakeful.terminal.display import Display
from wakeful.training.loop import train_run

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
    deadline = time.monotonic() + 120
    metrics = run / "metrics.jsonl"
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < step:
        assert time.monotonic() < deadline, "the run did not get there"
        time.sleep(0.002)


def kill_and_resume(config: Config, folder: Path, kills: list[int]) -> Run:
    """Kill a run after each number of metric rows, and resume it, at last in this process."""
    process = start(config, folder)
    for again, rows in enumerate(kills, start=1):
        wait_for_step(folder / "run", rows)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if again < len(kills):
            process = start(config, folder, "--resume", str(folder / "run"))
    return train_run(Config(), folder / "run", resume=True)


def assert_same(run: Run, uninterrupted: Run) -> None:
    assert losses(run) == losses(uninterrupted)
    assert [r["step"] for r in run.metrics()] == [r["step"] for r in uninterrupted.metrics()]
    mine, expected = weights(run), weights(uninterrupted)
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(mine[name], tensor), name


def left_by(run: Run) -> dict[str, Any]:
    """Return all that must not hang on interruptions: everything but times and places."""
    summary = run.read_json("summary.json")
    times = ("seconds", "tokens_per_second")
    return {
        "rows": [{k: v for k, v in row.items() if k not in times} for row in run.metrics()],
        "weights": {name: tensor.tolist() for name, tensor in weights(run).items()},
        "summary": {k: v for k, v in summary.items() if k not in (*times, "data")},
        "status": run.header.status,
        "files": sorted(entry.name for entry in run.path.iterdir()),
        "checkpoints": checkpoint.steps(run.checkpoints),
    }


@pytest.fixture(scope="session")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Give what a run leaves that nothing interrupted."""
    folder = tmp_path_factory.mktemp("uncut")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAKEFUL_CACHE", str(folder / "cache"))
        run = train_run(tiny(write_text(folder / "text")), folder / "run")
    return left_by(run)


@pytest.fixture
def stopped(text: Path, tmp_path: Path) -> Run:
    """Give a finished run with the checkpoints of steps 6 and 8."""
    return train_run(tiny(text), tmp_path / "run")


class Signalling(Display):
    """Sends this process a signal when a step is done, more than once if asked."""

    def __init__(self, number: signal.Signals, step: int, times: int = 1) -> None:
        self.number, self.at, self.times = number, step, times

    def step(self, done: int, *_: object) -> None:
        if done == self.at:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
