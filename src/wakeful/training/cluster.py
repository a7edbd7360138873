"""Work dealt out over processes or machines by submitit: runs, or all that one seed trains.

"local(workers=2)"                            processes of this machine
"slurm(workers=16, hours=12, partition='a')"  SLURM's jobs
"""

import collections
import itertools
import math
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakeful.config.rules import AtLeast, check_rules
from wakeful.config.schema import Config, config_from_table, config_to_table
from wakeful.data.tasks.base import task_of
from wakeful.device import choose_device, rough_seconds
from wakeful.errors import Diverged, Interrupted, WakefulError
from wakeful.runs.distributed import on_signal
from wakeful.runs.run import await_release, disk_errors, is_done, lock_file, refuse_link
from wakeful.terminal.display import Display
from wakeful.training.loop import train_run
from wakeful.training.setup import admit_parts
from wakeful.training.size import run_operations
from wakeful.variants import build_call
from wakeful.variants.plugins import optional

TRIES = 3
"""Jobs of one run that may end one after another without having saved a step."""
_PAUSE = {"local": 0.2, "slurm": 10.0}
"""Seconds between two looks at the jobs."""
_SAVES = 60.0
"""Seconds in which a worker of this machine ends its step and saves it."""
TOGETHER = 60.0
"""Seconds that a job of several small rows takes, very roughly: a process takes ten to begin."""
_LOGS = "jobs"
_COMMAND = ".command"
"""The file beside the logs' folders that a command holds while it distributes work."""
_ENGINE = "SUBMITIT_EXECUTOR"
"""Environment variable by which submitit names a job's launcher."""
THREADS = "OMP_NUM_THREADS"
"""Number of threads of torch."""


@dataclass(frozen=True)
class Ended:
    """The result of a job."""

    fault: str = ""
    """The fault; empty where there was none."""
    stopped: bool = False
    """True where a signal ended the work, which continues in another job."""
    diverged: bool = False
    """True where training diverged, as it would again."""


Call = tuple[Callable[..., Ended], *tuple[Any, ...]]
"""A function and what it is called with."""


@dataclass(frozen=True)
class Cluster:
    """Place of training, and the number of runs at a time."""

    engine: str
    workers: int
    gpus: int
    """Of each."""
    parameters: Mapping[str, Any]
    """Of submitit's executor."""


@dataclass(frozen=True)
class Work:
    """A piece of work, which goes on in another job where one ended before it was done."""

    label: str
    """Its name in messages."""
    place: Path
    """The folder that its checkpoints are below."""
    call: Call
    """The function that the job calls, and its arguments."""
    after: Collection[str] = ()
    """The labels of what must have ended before it begins."""
    operations: float = math.inf
    """Floating-point operations that it takes, very roughly; inf has a job of its own."""
    said: bool = True
    """True where the run in its place says when nothing is left to do; else only its job does."""

    @property
    def done(self) -> bool:
        """Tell whether no work is known to remain."""
        return self.said and is_done(self.place)


def run_work(label: str, config: Config, place: Path) -> Work:
    """Return a run to be trained, or what is left of it."""
    call = train_row, config_to_table(config), str(place)
    return Work(label, place, call, operations=run_operations(config))


def cluster_of(expression: str) -> Cluster:
    """Return the cluster that an expression names.

    Raises:
        WakefulError: it names none, an option is out of its range, submitit is not installed, or
            SLURM is not to be had here.
    """
    known = {"local": _local, "slurm": _slurm}
    found: Cluster = build_call("cluster", known, expression)(expression)
    check_rules(found, AtLeast("workers", 1), AtLeast("gpus", 0))
    _submitit()
    if found.engine == "slurm" and shutil.which("srun") is None:
        raise WakefulError(
            f"cluster = {expression}: there is no srun here; give the command on a machine that "
            "submits to SLURM"
        )
    return found


def deal(
    rows: Sequence[Work],
    cluster: Cluster,
    folder: Path,
    show: Display,
    *,
    may_diverge: Container[str] = (),
    may_fail: bool = False,
) -> dict[str, str]:
    """Do the work that is not done, in jobs of a row or of several small ones, `workers` at a time.

    What a job left goes on in another, a run from its newest checkpoint. Jobs write what they say
    into a new folder below `folder`/jobs, which all machines must see, as they must the rows'
    folders. submitit unpickles what its jobs leave there, so nothing that was there before is read.
    Where a row of a label in `may_diverge` does so, the others go on without it, and with
    `may_fail` whatever was wrong. Return what was wrong with those, by label.

    Workers of this machine end when the command does, also where it is killed.

    Raises:
        WakefulError: a row's training refused to begin or to go on, its jobs kept ending before
            they had saved a step, or another command's workers are at it.
        Interrupted: SIGTERM came, and the jobs are canceled.
    """
    submitit, command = _submitit(), folder / _LOGS / _COMMAND
    logs = command.with_name(secrets.token_hex(8))
    running = dict[int, tuple[list[Work], Any]]()
    taken = (
        f"another command distributes work in {folder}, or the workers of one that was killed are "
        "saving their step: wait a minute, then give the command again"
    )
    refuse_link(command.parent)
    refuse_link(command)
    with disk_errors(logs):
        command.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(command, taken), ExitStack() as ends:
        executor = _executor(submitit, cluster, logs)
        left = [row for row in rows if not row.done]
        dealing = _Dealing(left, cluster.workers, logs, may_diverge, may_fail)
        ends.callback(on_signal, signal.SIGTERM, on_signal(signal.SIGTERM, _stop))
        ends.callback(lambda: _end([job for _, job in running.values()], cluster))
        while dealing.waiting or running:
            for slot in range(cluster.workers):
                if slot not in running and (batch := dealing.batch()):
                    job = _submitted(executor, cluster, slot, batch, command)
                    running[slot] = batch, job
            for slot, (batch, job) in list(running.items()):
                if not job.done():
                    for row in itertools.takewhile(lambda row: row.done, batch):
                        dealing.trained(row, show)
                    continue
                del running[slot]
                for row, came in zip(batch, _result(submitit, job, batch), strict=False):
                    dealing.ended(row, came, show)
                again = [row for row in batch if row.label in dealing.left]
                dealing.waiting = again + dealing.waiting
            time.sleep(_PAUSE[cluster.engine] if running else 0)
    return dealing.faults


class _Dealing:
    """Work left to be dealt out, and the outcome of the rest."""

    def __init__(
        self,
        rows: Sequence[Work],
        workers: int,
        logs: Path,
        may_diverge: Container[str],
        may_fail: bool,
    ) -> None:
        self.waiting, self.total, self.workers, self.logs = list(rows), len(rows), workers, logs
        self.may_diverge, self.may_fail = may_diverge, may_fail
        self.left = {row.label for row in rows}
        """The labels of what is still to be done."""
        self.faults: dict[str, str] = {}
        self.tries: collections.Counter[str] = collections.Counter()
        self.saved: dict[str, set[str]] = {}
        self.speed = rough_seconds(1.0, choose_device("auto")) if rows else 0.0

    def batch(self) -> list[Work]:
        """Take the next job's rows: those that may begin, in order, up to a worker's share of all.

        The share is taken of what is left, so that the last jobs are short and end together.
        """
        ready = [row for row in self.waiting if self.left.isdisjoint(row.after)]
        times = [self.speed * row.operations for row in ready]
        most = min(TOGETHER, sum(times) / self.workers)
        spent = list(itertools.accumulate(times))
        batch = [row for row, until in zip(ready, spent, strict=True) if until <= most]
        batch = batch or ready[:1]
        taken = {row.label for row in batch}
        self.waiting = [row for row in self.waiting if row.label not in taken]
        for row in batch:
            self.saved[row.label] = _saved(row.place)
        return batch

    def trained(self, row: Work, show: Display) -> None:
        """Say once that a row has ended."""
        if row.label in self.left:
            self.left.discard(row.label)
            show.note(f"{row.label} is done ({self.total - len(self.left)} of {self.total})")

    def ended(self, row: Work, came: Ended, show: Display) -> None:
        """Take the outcome of a row in a job that has ended; raise it if others need that row."""
        fault = came.fault
        if not fault or row.done:  # a signal may come after the last step
            self.trained(row, show)
            return
        if came.stopped:
            if _saved(row.place) != self.saved[row.label]:
                self.tries[row.label] = 0
            self.tries[row.label] += 1
            if self.tries[row.label] < TRIES:
                show.note(f"{row.label}: its job ended ({fault}); it goes on in another")
                return
            fault = (
                f"{TRIES} jobs in a row ended before they had saved a step, the last with {fault}; "
                f"see {self.logs}, then give the same command again"
            )
        if not (self.may_fail or (came.diverged and row.label in self.may_diverge)):
            raise (Diverged if came.diverged else WakefulError)(f"{row.label}: {fault}")
        show.note(f"{row.label}: {fault}; the others go on without it")
        self.faults[row.label] = fault
        self.left.discard(row.label)


def _end_with(command: str) -> None:
    """Let this worker save its step and end once nobody holds the file of its command."""

    def watch() -> None:
        with Path(command).open() as file:
            await_release(file)  # the next command sees that this process lives
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_SAVES)
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _saved(place: Path) -> set[str]:
    """Return the checkpoints that are there; a run that goes on has others later."""
    return {each.as_posix() for each in place.rglob("step-*")}


def _end(jobs: Sequence[Any], cluster: Cluster) -> None:
    """Cancel jobs, those of this machine after they have saved the step under way.

    SLURM itself gives its jobs the time to save. Submitit's local `cancel` sends SIGINT and kills a
    worker that still runs a second later, but its controller passes a SIGTERM on and waits.
    """
    if cluster.engine == "local":
        for job in jobs:
            job._process.send_signal(signal.SIGTERM)
        until = time.monotonic() + _SAVES
        while time.monotonic() < until and not all(job.done() for job in jobs):
            time.sleep(_PAUSE["local"])
        jobs = [job for job in jobs if not job.done()]
    for job in jobs:
        job.cancel()


def _stop(number: int, frame: Any) -> None:
    raise Interrupted(
        "stopped by SIGTERM, and its jobs are canceled",
        "give the same command again, a comparison with --resume",
    )


def train_row(table: Mapping[str, Any], place: str) -> Ended:
    """Train a run or go on with it.

    The configuration is what the user wrote, so the modules that it names are imported: a job is a
    new process, and going on with a run imports none.
    """

    def work() -> None:
        config = config_from_table(table)
        admit_parts(config)
        task_of(config.data.source, imports=True)
        train_run(config, place, resume=(Path(place) / "run.json").is_file())

    return ended_of(work)


def in_turn(calls: Sequence[Call], command: str = "") -> list[Ended]:
    """Do a job's rows one after another, up to one that is stopped; return what became of each.

    A worker of this machine ends with the process that holds the file `command`.
    """
    if command and os.environ.get(_ENGINE) == "local":
        _end_with(command)
    ended: list[Ended] = []
    for function, *given in calls:
        ended.append(function(*given))
        if ended[-1].stopped:
            break
    return ended


def ended_of(work: Callable[[], object]) -> Ended:
    """Do a job's work and return what was wrong."""
    if os.environ.get(_ENGINE) == "local":
        os.setpgrp()  # a terminal's Ctrl-C goes to the command, which ends this job
    try:
        work()
    except Interrupted:
        return Ended("it was stopped", stopped=True)
    except WakefulError as error:
        return Ended(str(error), diverged=isinstance(error, Diverged))
    return Ended()


def _executor(submitit: Any, cluster: Cluster, logs: Path) -> Any:
    if cluster.engine == "local":  # the automatic one does not let a job see GPUs of its own
        executor = submitit.LocalExecutor(folder=logs)
    else:
        executor = submitit.AutoExecutor(folder=logs, cluster=cluster.engine)
    executor.update_parameters(**cluster.parameters)
    return executor


def _submitted(
    executor: Any, cluster: Cluster, slot: int, batch: Sequence[Work], command: Path
) -> Any:
    calls = [row.call for row in batch]
    if cluster.engine == "local" and cluster.gpus:
        own = range(slot * cluster.gpus, (slot + 1) * cluster.gpus)
        executor.update_parameters(visible_gpus=list(own))
    if cluster.engine != "local":
        return executor.submit(in_turn, calls)
    # What begins now ignores a terminal's Ctrl-C: the command ends it in its own way.
    before = on_signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _threads(cluster.workers):
            return executor.submit(in_turn, calls, str(command))
    finally:
        on_signal(signal.SIGINT, before)


@contextmanager
def _threads(workers: int) -> Iterator[None]:
    """Let a process that begins now have its share of the cores, unless the user says how many."""
    if THREADS in os.environ:
        yield
        return
    # macOS has no such call; of the machine's cores a process of Linux may have only some.
    ours = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    os.environ[THREADS] = str(max(1, len(ours) // workers))
    try:
        yield
    finally:
        del os.environ[THREADS]


def _result(submitit: Any, job: Any, batch: Sequence[Work]) -> list[Ended]:
    """Return the outcomes of an ended job's rows, up to its end; a killed one was stopped."""
    try:
        return job.result()
    except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        fault = lines[-1].strip()[:200] if lines else type(error).__name__
        finished = [Ended() for _ in itertools.takewhile(lambda row: row.done, batch)]
        return [*finished, Ended(fault, stopped=True)][: len(batch)]


def _submitit() -> Any:
    return optional("submitit", extra="cluster", wants="--cluster")


def _local(_written: str, *, workers: int = 2, gpus: int = 0, hours: float = 720.0) -> Cluster:
    """Return processes of this machine, each with `gpus` GPUs of its own."""
    parameters: dict[str, Any] = {"timeout_min": round(60 * hours), "gpus_per_node": gpus}
    return Cluster("local", workers, gpus, parameters)


def _slurm(
    _written: str,
    *,
    workers: int = 8,
    hours: float = 24.0,
    gpus: int = 1,
    cpus: int = 8,
    memory_gb: int = 0,
    partition: str = "",
    account: str = "",
    qos: str = "",
    constraint: str = "",
) -> Cluster:
    """Return SLURM's jobs, each of one machine's `gpus` GPUs and `cpus` cores."""
    named = {"partition": partition, "account": account, "qos": qos, "constraint": constraint}
    parameters: dict[str, Any] = {
        "name": "wakeful", "timeout_min": round(60 * hours), "gpus_per_node": gpus,
        "cpus_per_task": cpus,
    }  # fmt: skip
    parameters |= {"mem_gb": memory_gb} if memory_gb else {}
    parameters |= {f"slurm_{name}": value for name, value in named.items() if value}
    return Cluster("slurm", workers, gpus, parameters)
