"""Rows dealt out over workers: each an ordinary run, gone on with where its worker was killed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from training.runs import tiny
from wakeful.cli import INTERRUPTED
from wakeful.config.schema import Config, config_to_toml
from wakeful.errors import Diverged, Interrupted, WakefulError
from wakeful.runs import checkpoint
from wakeful.runs.run import Run
from wakeful.terminal.display import Display
from wakeful.training import cluster
from wakeful.training.cluster import (
    JobResult,
    Work,
    cluster_of,
    distribute_work,
    run_work,
    train_from_table,
)
from wakeful.training.loop import train_run
from wakeful.training.rows import train_variants

SHORT = {"steps": 2, "eval_every": 0, "checkpoint_every": 1, "batch_size": 2}


class Notes(Display):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


class Job:
    """A job of the stand-in: done at the second look, with what its worker left."""

    def __init__(self, work: Any) -> None:
        self.work, self.looks, self.cancelled = work, 0, False

    def done(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def result(self) -> str:
        return self.work()

    def cancel(self) -> None:
        self.cancelled = True

    @property
    def _process(self) -> SimpleNamespace:
        return SimpleNamespace(send_signal=lambda _: self.cancel())


class Submitit:
    """A fake submitit, which runs a submitted call when its result is asked for."""

    def __init__(self, fails: dict[str, int]) -> None:
        self.fails, self.jobs, self.most = fails, list[Job](), 0
        self.parameters: list[dict[str, Any]] = []
        errors = {"FailedJobError": RuntimeError, "UncompletedJobError": OSError}
        self.core = SimpleNamespace(utils=SimpleNamespace(**errors))

    def AutoExecutor(self, folder: Path, cluster: str) -> "Submitit":
        self.folder, self.engine = folder, cluster
        return self

    def LocalExecutor(self, folder: Path) -> "Submitit":
        return self.AutoExecutor(folder, "local")

    def update_parameters(self, **kwargs: Any) -> None:
        self.parameters.append(kwargs)

    def submit(self, work: Any, *args: Any) -> Job:
        under_way = sum(job.looks < 2 for job in self.jobs)
        self.most = max(self.most, under_way + 1)

        def worked() -> str:
            (_, *_, folder) = args[0]  # the row's call
            if self.fails.get(folder, 0):
                self.fails[folder] -= 1
                raise OSError("Job not requeued because: the machine is gone")
            return work(*args)

        self.jobs.append(Job(worked))
        return self.jobs[-1]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_PAUSE", {"local": 0.02, "slurm": 0.0})


def stand_in(monkeypatch: pytest.MonkeyPatch, fails: dict[str, int]) -> Submitit:
    submitit = Submitit(fails)
    monkeypatch.setattr(cluster.shutil, "which", lambda name: name)
    monkeypatch.setitem(sys.modules, "submitit", submitit)  # pyright: ignore[reportArgumentType]
    return submitit


def rows(text: Path, tmp_path: Path, count: int) -> list[Work]:
    config = tiny(text, train=SHORT)
    return [run_work(f"row {n}", config, tmp_path / "out" / str(n)) for n in range(count)]


@pytest.mark.slow
def test_rows_are_dealt_out_so_many_at_a_time_and_moved_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = rows(text, tmp_path, 3)
    submitit = stand_in(monkeypatch, {str(three[0].folder): 1})
    train_from_table(*three[2].call[1:])  # is there already
    notes = Notes()
    distribute_work(three, cluster_of("local(workers=2, gpus=2)"), tmp_path / "out", notes)
    assert all(row.done for row in three)
    assert submitit.engine == "local"
    assert submitit.folder.parent == tmp_path / "out" / "jobs"
    assert submitit.most == 2
    assert len(submitit.jobs) == 3  # two rows, and one again
    gpus = [
        parameters["visible_gpus"]
        for parameters in submitit.parameters
        if "visible_gpus" in parameters
    ]
    assert gpus[:2] == [[0, 1], [2, 3]]
    assert "row 0: its job ended (Job not requeued because: the machine is gone)" in notes.lines[0]
    assert sum("is done" in line for line in notes.lines) == 2


def test_what_cannot_be_trained_is_said_once_and_the_others_are_cancelled(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = rows(text, tmp_path, 2)
    (first.folder).mkdir(parents=True)
    (first.folder / "mine.txt").write_text("mine")
    submitit = stand_in(monkeypatch, {})
    with pytest.raises(WakefulError, match=r"row 0: .*exists"):
        distribute_work([first, second], cluster_of("slurm(workers=2)"), tmp_path / "out", Notes())
    assert submitit.jobs[1].cancelled
    submitit = stand_in(monkeypatch, {str(second.folder): 9})
    with pytest.raises(WakefulError, match="row 1: 3 jobs in a row ended before they had saved"):
        distribute_work([second], cluster_of("slurm(workers=2)"), tmp_path / "out", Notes())


def test_a_row_that_is_stopped_goes_on_before_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, {})
    stopped = [Piece("one", tmp_path / "a"), Piece("two", tmp_path / "b", stops=1),
               Piece("three", tmp_path / "c")]  # fmt: skip
    notes = Notes()
    distribute_work(stopped, cluster_of("slurm(workers=1)"), tmp_path, notes)
    assert [line.partition(" is")[0] for line in notes.lines] == [
        "one", "two: its job ended (it was stopped); it goes on in another", "two", "three",
    ]  # fmt: skip


def test_what_waits_for_another_begins_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, {})
    notes = Notes()
    first = Piece("first", tmp_path / "first", fault="it broke")
    heir = Piece("heir", tmp_path / "heir", after=("first",))
    second = Piece("other", tmp_path / "other")
    where = cluster_of("slurm(workers=1)")
    faults = distribute_work([heir, first, second], where, tmp_path, notes, may_fail=True)
    assert faults == {"first": "it broke"}
    assert notes.lines == ["first: it broke; the others go on without it",
                           "heir is done (2 of 3)", "other is done (3 of 3)"]  # fmt: skip
    with pytest.raises(WakefulError, match="first: it broke"):
        distribute_work([first, heir], where, tmp_path, notes)


def test_workers_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {})
    monkeypatch.setattr(cluster.os, "sched_getaffinity", lambda _: set(range(8)))
    threads: list[str | None] = []
    real = Submitit.submit

    def submit(self: Submitit, work: Any, *calls: Any) -> Job:
        threads.append(os.environ.get("OMP_NUM_THREADS"))
        return real(self, work, *calls)

    monkeypatch.setattr(Submitit, "submit", submit)
    for where in ("local(workers=3)", "local(workers=99)", "slurm(workers=3)"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        distribute_work([Piece("row", tmp_path / where)], cluster_of(where), tmp_path, Notes())
        assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    distribute_work(
        [Piece("row", tmp_path / "own")], cluster_of("local(workers=3)"), tmp_path, Notes()
    )
    assert threads == ["2", "1", None, "5"]


class Piece(Work):
    """Work that fails, or is stopped so many times."""

    def __init__(
        self, label: str, folder: Path, after: tuple[str, ...] = (), fault: str = "", stops: int = 0
    ) -> None:
        super().__init__(label, folder, (done_at, fault, stops, str(folder)), after)

    @property
    def done(self) -> bool:
        return (self.folder / "done").exists()


def done_at(fault: str, stops: int, folder: str) -> JobResult:
    if fault:
        return JobResult(fault)
    Path(folder).mkdir(exist_ok=True)
    tries = len([*Path(folder).glob("try-*")])
    if tries < stops:
        (Path(folder) / f"try-{tries}").touch()
        return JobResult("it was stopped", stopped=True)
    (Path(folder) / "done").touch()
    return JobResult()


class Preempted(Work):
    """Work whose every job but the last is ended, having saved a step."""

    def __init__(self, label: str, folder: Path) -> None:
        super().__init__(label, folder, (step, str(folder)))

    @property
    def done(self) -> bool:
        return (self.folder / "step-5").is_dir()


def step(folder: str) -> JobResult:
    saved = [*Path(folder).glob("step-*")]
    for saved_step in saved:  # old ones are pruned
        saved_step.rmdir()
    (Path(folder) / f"step-{len(saved) and int(saved[0].name[-1]) + 1}").mkdir(parents=True)
    done = (Path(folder) / "step-5").is_dir()
    return JobResult() if done else JobResult("it was stopped", stopped=True)


def test_a_run_is_preempted_as_often_as_may_be_while_it_saves_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitit, work = stand_in(monkeypatch, {}), Preempted("mine", tmp_path / "mine")
    distribute_work([work], cluster_of("slurm(workers=1)"), tmp_path, Notes())
    assert work.done
    assert len(submitit.jobs) == 6


def test_jobs_before_a_saved_step_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SavedOnce(Work):
        """Work whose first job saves a step and whose further jobs save none."""

        @property
        def done(self) -> bool:
            return False

    def save_once(folder: str) -> JobResult:
        (Path(folder) / "step-1").mkdir(parents=True, exist_ok=True)
        return JobResult("it was stopped", stopped=True)

    submitit = stand_in(monkeypatch, {})
    work = SavedOnce("mine", tmp_path / "mine", (save_once, str(tmp_path / "mine")))
    with pytest.raises(WakefulError, match="3 jobs in a row ended before they had saved a step"):
        distribute_work([work], cluster_of("slurm(workers=1)"), tmp_path, Notes())
    assert len(submitit.jobs) == 4


def test_sigterm_cancels_the_jobs(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitit = stand_in(monkeypatch, {})
    mine = signal.getsignal(signal.SIGTERM)
    two = rows(text, tmp_path, 2)
    monkeypatch.setattr(cluster.time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Interrupted, match="its jobs are canceled; give the same command again"):
        distribute_work(two, cluster_of("local(workers=2)"), tmp_path / "out", Notes())
    assert [job.cancelled for job in submitit.jobs] == [True, True]
    assert signal.getsignal(signal.SIGTERM) == mine


def test_a_cluster_is_an_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {})
    actual = cluster_of("slurm(workers=3, hours=1.5, gpus=4, partition='a')")
    assert (actual.engine, actual.workers, actual.gpus) == ("slurm", 3, 4)
    assert actual.parameters["timeout_min"] == 90
    assert actual.parameters["slurm_partition"] == "a"
    assert not {"mem_gb", "slurm_account"} & set(actual.parameters)
    for wrong, message in (("ray", "is not one of local, slurm"),
                           ("local(workers=0)", "workers must be at least 1"),
                           ("local(workers=resformer)", "'resformer' is not a plain value"),
                           ("local(nodes=2)", "no option 'nodes'")):  # fmt: skip
        with pytest.raises(WakefulError, match=message):
            cluster_of(wrong)
    monkeypatch.setattr(cluster.shutil, "which", lambda _: None)
    with pytest.raises(WakefulError, match="there is no srun here"):
        cluster_of("slurm")
    assert cluster_of("local").engine == "local"
    monkeypatch.setitem(sys.modules, "submitit", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(WakefulError, match=r"pip install 'wakeful\[cluster\]'"):
        cluster_of("local")


def test_a_row_says_what_was_wrong_with_it(text: Path, tmp_path: Path) -> None:
    from wakeful.config.schema import config_to_table

    table = config_to_table(tiny(text, train=SHORT))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    assert "exists" in train_from_table(table, str(tmp_path / "full")).fault


@pytest.mark.slow
def test_a_row_that_diverges_does_not_end_the_others(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"lr": 1e38, "final_lr": 1e38, "initial_lr": 1e38, "warmup_steps": 0, "clip": 0.0}
    wild = tiny(text, train=SHORT, optimizer=rates | {"name": "torch.optim:SGD"})
    plain = tiny(text, train=SHORT)
    notes = Notes()

    @contextlib.contextmanager
    def open_display(_: str) -> Iterator[Display]:
        yield notes

    def compared(folder: str, resume: bool = False, **variants: Config) -> Run:
        submitit = stand_in(monkeypatch, {})
        run = train_variants(
            variants, tmp_path / folder, seeds=[0], display=open_display, resume=resume,
            cluster="slurm(workers=2)",
        )  # fmt: skip
        assert len(submitit.jobs) <= len(variants)  # it would diverge again
        return run

    for resume in (False, True):
        run = compared("cmp", resume, plain=plain, wild=wild, last=plain)
        assert run.header.status == "stopped"
        assert Run.open(run.path / "last" / "seed-0").header.status == "done"
        (message,) = (line for line in notes.lines if "the others go on without it" in line)
        assert message.startswith("wild, seed 0: ")
        assert "Lower optimizer.lr" in message
        notes.lines.clear()
    compared("cmp", resume=True, wild=wild)  # the folder's baseline, not the first that is named
    with pytest.raises(Diverged, match=r"wild, seed 0: .*Lower optimizer"):
        compared("other", wild=wild, plain=plain)


def test_a_worker_of_this_machine_sees_its_own_gpus(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = pytest.importorskip("submitit.local.local")
    submitted: list[tuple[str, float]] = []

    def start(*, cuda_devices: str, timeout_min: float, **_: object) -> SimpleNamespace:
        submitted.append((cuda_devices, timeout_min))
        if len(submitted) == 2:
            raise RuntimeError("both are submitted")
        return SimpleNamespace(pid=1, poll=lambda: 0, send_signal=lambda _: None)

    monkeypatch.setattr(local, "start_controller", start)
    with pytest.raises(RuntimeError, match="both are submitted"):
        distribute_work(
            rows(text, tmp_path, 2), cluster_of("local(workers=2, gpus=2, hours=1)"), tmp_path,
            Notes(),
        )  # fmt: skip
    assert submitted == [("0,1", 60), ("2,3", 60)]


def workers_of(folder: Path) -> list[int]:
    """Return the processes that train rows of a folder."""
    actual = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                arguments = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
                jobs = any(word.startswith(str(folder / "jobs")) for word in arguments)
                if "submitit.core._submit" in arguments and jobs:
                    actual.append(int(entry.name))
    return actual


def start_comparison(text: Path, tmp_path: Path) -> tuple[subprocess.Popen[str], list[Path]]:
    """Begin a comparison of two long rows; return its process and their logs, once both train."""
    config = tiny(text, train=SHORT | {"steps": 100_000, "checkpoint_every": 0})
    table = (
        config_to_toml(config) + "\n[variants.plain]\n[variants.cured.model]\nroute = 'svformer'"
    )
    (tmp_path / "two.toml").write_text(table)
    command = [sys.executable, "-m", "wakeful", "compare", "two.toml", "--out", "cmp",
               "--cluster", "local(workers=2)"]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    until = time.monotonic() + 300
    logs = [tmp_path / "cmp" / name / "seed-0" / "metrics.jsonl" for name in ("plain", "cured")]
    while not all(log.exists() and log.stat().st_size for log in logs):
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.1)
    return process, logs


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds workers in /proc")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_workers_of_a_stopped_command_save_their_step(
    text: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    pytest.importorskip("submitit")
    process, logs = start_comparison(text, tmp_path)
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)  # as a terminal does
    else:
        process.send_signal(sent)
    _, message = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED
    assert "Traceback" not in message
    assert not workers_of(tmp_path / "cmp")
    for log in logs:
        run = Run.open(log.parent)
        assert run.header.status == "stopped"
        assert checkpoint.newest_checkpoint(run.checkpoints).is_dir()


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds workers in /proc")
def test_two_workers_one_killed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    changes = {"train": {**SHORT, "steps": 100, "checkpoint_every": 5}}
    variants: dict[str, Config] = {
        "plain": tiny(text, **changes),
        "cured": tiny(text, **changes, model={"route": "svformer"}),
    }
    folder = tmp_path / "cmp"
    notes, killed = Notes(), []

    def kill() -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until and not killed:
            checkpoints = list(folder.glob("*/seed-*/checkpoints/*"))
            if checkpoints:
                for process in workers_of(folder)[:1]:
                    os.kill(process, signal.SIGKILL)
                    killed.append(process)
            time.sleep(0.02)

    @contextlib.contextmanager
    def open_display(_: str) -> Iterator[Display]:
        yield notes

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    run = train_variants(
        variants, folder, seeds=[1], display=open_display, cluster="local(workers=2)"
    )
    thread.join()
    assert killed
    assert any("it goes on in another" in line for line in notes.lines), notes.lines
    assert run.header.status == "done"
    alone = {name: train_run(Run.open(folder / name / "seed-1").config, tmp_path / name)
             for name in variants}  # fmt: skip
    for name, single_run in alone.items():
        actual, expected = (
            load_file(checkpoint.newest_checkpoint(one_of_runs.checkpoints) / "model.safetensors")
            for one_of_runs in (Run.open(folder / name / "seed-1"), single_run)
        )
        assert all(torch.equal(actual[key], expected[key]) for key in actual)
