"""Runs of several processes that are killed, and what a launcher must say."""

import os
import signal
import time
from pathlib import Path

import pytest

from training import processes
from training.runs import tiny
from training.shares import assert_alike, config_of
from wakeful.cli import main
from wakeful.config.schema import Config, config_to_toml
from wakeful.errors import WakefulError
from wakeful.runs import checkpoint
from wakeful.runs.distributed import World, started_as
from wakeful.runs.run import Run
from wakeful.training.loop import train_run
from wakeful.training.parallel import check_shares


@pytest.mark.slow
def test_a_killed_process_ends_all_and_the_run_goes_on(folder: Path) -> None:
    config = config_of(folder, {"train": {"steps": 60, "checkpoint_every": 10, "eval_every": 0}})
    (folder / "config.toml").write_text(config_to_toml(config))
    path = folder / "killed"
    running = processes.start(2, "train", str(folder / "config.toml"), "--out", str(path))
    processes.wait_for_rows(path, 15)
    everybody = processes.workers(running)
    began = time.monotonic()
    os.kill(everybody[1], signal.SIGKILL)
    time.sleep(0.02)
    os.kill(everybody[0], signal.SIGTERM)  # torchrun sends it too, a little later
    status, _, errors = processes.ended(running)
    assert time.monotonic() - began < processes.ENDS_WITHIN
    assert status == 1
    assert not any(Path(f"/proc/{number}").exists() for number in everybody.values())
    (line,) = processes.error_lines(errors)
    assert "another process of this run is gone" in line
    assert (
        f"0 is kept; continue with: torchrun [as before] -m wakeful train --resume {path}" in line
    )
    run = Run.open(path)
    assert run.header.status == "stopped"
    assert checkpoint.steps(run.checkpoints)[-1] >= 10
    expected = train_run(config, folder / "one" / "long")
    assert_alike(train_run(Config(), path, resume=True), expected, 1e-5)  # 60 steps of rounding


@pytest.mark.long
@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (-1, signal.SIGTERM)])
def test_the_first_process_killed_or_all_stopped_loses_nothing(
    folder: Path, tmp_path: Path, rank: int, number: signal.Signals
) -> None:
    config = config_of(folder, {"train": {"steps": 60, "checkpoint_every": 10, "eval_every": 0}})
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    path = tmp_path / "run"
    running = processes.start(3 if rank else 2, "train", str(tmp_path / "config.toml"),
                              "--out", str(path), "--train.batch-size", "6")  # fmt: skip
    processes.wait_for_rows(path, 15)
    os.kill(running.pid if rank < 0 else processes.workers(running)[rank], number)
    _, _, errors = processes.ended(running)
    (line,) = processes.error_lines(errors)
    step = checkpoint.steps(path / "checkpoints")[-1]
    if rank < 0:
        assert f"stopped by SIGTERM after step {step}, which is saved; continue with" in line
    else:
        assert "another process of this run is gone" in line
    again = processes.start(2, "train", "--resume", str(path))
    status, _, errors = processes.ended(again)
    assert status == 0, errors
    steps = [row["step"] for row in Run.open(path).metrics() if row["kind"] == "train"]
    assert steps == list(range(1, 61))


def test_shares_of_a_batch(tmp_path: Path) -> None:
    four = World(rank=1, size=4)
    config = tiny(tmp_path, train={"batch_size": 12, "micro_batch_size": 6})
    check_shares(config, four)  # a share of 3 is below the most at once
    with pytest.raises(WakefulError, match="micro_batch_size = 2 does not divide the 3 sequences"):
        check_shares(tiny(tmp_path, train={"batch_size": 12, "micro_batch_size": 2}), four)
    with pytest.raises(WakefulError, match=r"batch_size = 3 .* by 4 processes; use 4 or more"):
        check_shares(tiny(tmp_path, train={"batch_size": 3}), four)


def test_an_environment_of_half_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for size in ("2", "many"):
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(WakefulError, match=r"start several processes with torchrun, or unset"):
            started_as()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert started_as() == (0, 1)


@pytest.mark.parametrize(
    "verb", ["diagnose", "evaluate", "cure", "quantize", "generate", "export", "report"]
)
def test_verbs_of_one_process_refuse_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main([verb, "nowhere"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"wakeful {verb}: WORLD_SIZE is 2, and {verb} takes one process")
    assert line.endswith(
        "(several are for train, inherit); start it without torchrun, or unset WORLD_SIZE"
    )
