"""Work dealt out over processes or machines by submitit: runs, or all that one seed trains.

"local(workers=2)"                            processes of this machine
"slurm(workers=16, hours=12, partition='a')"  SLURM's jobs
"""

import collections
import os
import shutil
import signal
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from wakeful.config.schema import Config, config_from_table, config_to_table
from wakeful.config.tables import at_least
from wakeful.data.tasks.base import task_of
from wakeful.display import Display
from wakeful.errors import Diverged, Interrupted, WakefulError
from wakeful.runs.run import is_done
from wakeful.training.loop import train
from wakeful.training.setup import admit_parts
from wakeful.variants import build_call
from wakeful.world import on_signal

TRIES = 3
"""Jobs of one run that may end one after another without having saved a step."""
_PAUSE = {"local": 0.2, "slurm": 10.0}
"""Seconds between two looks at the jobs."""
_SAVES = 60.0
"""Seconds in which a worker of this machine ends its step and saves it."""
_LOGS = "jobs"


@dataclass(frozen=True)
class Ended:
    """What a job returns."""

    fault: str = ""
    """What was wrong; empty where nothing was."""
    stopped: bool = False
    """Whether a signal ended the work, which goes on in another job."""
    diverged: bool = False
    """Whether training ran into numbers that are not finite, as it would again."""


Call = tuple[Callable[..., Ended], *tuple[Any, ...]]
"""A function and what it is called with."""


@dataclass(frozen=True)
class Cluster:
    """Where runs are trained, and how many at a time."""

    engine: str
    workers: int
    gpus: int
    """Of each."""
    parameters: Mapping[str, Any]
    """Of submitit's executor."""


@runtime_checkable
class Work(Protocol):
    """What a job does, and what goes on in another where a job ended before it was done."""

    @property
    def label(self) -> str:
        """What it is called in messages."""
        ...

    @property
    def place(self) -> Path:
        """The folder that its checkpoints are below."""
        ...

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        ...

    @property
    def call(self) -> Call:
        """What the job calls."""
        ...


@dataclass(frozen=True)
class Row:
    """A run to be trained."""

    label: str
    config: Config
    place: Path

    @property
    def done(self) -> bool:
        """Whether it is finished."""
        return is_done(self.place)

    @property
    def call(self) -> Call:
        """Its training, or what is left of it."""
        return train_row, config_to_table(self.config), str(self.place)


def cluster_of(expression: str) -> Cluster:
    """Return the cluster that an expression names.

    Raises:
        WakefulError: it names none, an option is out of its range, submitit is not installed, or
            SLURM is not to be had here.
    """
    known = {"local": _local, "slurm": _slurm}
    found: Cluster = build_call("cluster", known, expression)(expression)
    at_least(1, found, "workers")
    at_least(0, found, "gpus")
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
) -> dict[str, str]:
    """Do the work that is not done, each row's in a job of its own, `workers` at a time.

    What a job left goes on in another, a run from its newest checkpoint. Jobs write
    what they say into `folder`/jobs, which all machines must see, as they must the rows' folders.
    Where a row of a label in `may_diverge` does so, the others go on without it. Return what was
    wrong with those, by label.

    Raises:
        WakefulError: a row's training refused to begin or to go on, or its jobs kept ending
            before they had saved a step.
        Interrupted: SIGTERM came, and the jobs are cancelled.
    """
    submitit = _submitit()
    executor = _executor(submitit, cluster, folder / _LOGS)
    waiting = collections.deque(row for row in rows if not row.done)
    ended: collections.Counter[str] = collections.Counter()
    saved: dict[str, set[str]] = {}
    diverged: dict[str, str] = {}
    total, running = len(waiting), dict[int, tuple[Work, Any]]()
    before = on_signal(signal.SIGTERM, _stop)
    try:
        while waiting or running:
            for slot in range(cluster.workers):
                if waiting and slot not in running:
                    row = waiting.popleft()
                    saved[row.label] = _saved(row.place)
                    running[slot] = row, _submitted(executor, cluster, slot, row)
            for slot, (row, job) in list(running.items()):
                if not job.done():
                    continue
                del running[slot]
                came = _result(submitit, job)
                fault = came.fault
                if not fault or row.done:  # a signal may come after the last step
                    left = len(waiting) + len(running)
                    show.note(f"{row.label} is trained ({total - left} of {total})")
                    continue
                if came.diverged and row.label in may_diverge:
                    show.note(f"{row.label}: {fault}; the others go on without it")
                    diverged[row.label] = fault
                    continue
                if not came.stopped:
                    raise (Diverged if came.diverged else WakefulError)(f"{row.label}: {fault}")
                if _saved(row.place) != saved[row.label]:
                    ended[row.label] = 0
                ended[row.label] += 1
                if ended[row.label] == TRIES:
                    raise WakefulError(
                        f"{row.label}: {TRIES} jobs in a row ended before they had saved a step, "
                        f"the last with {fault}; see {folder / _LOGS}, then give the same command "
                        "again"
                    )
                show.note(f"{row.label}: its job ended ({fault}); it goes on in another")
                waiting.append(row)
            time.sleep(_PAUSE[cluster.engine] if running else 0)
    finally:
        _end([job for _, job in running.values()], cluster)
        on_signal(signal.SIGTERM, before)
    return diverged


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
        "stopped by SIGTERM, and its jobs are cancelled",
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
        train(config, place, resume=(Path(place) / "run.json").is_file())

    return told(work)


def told(work: Callable[[], object]) -> Ended:
    """Do a job's work and return what was wrong."""
    if os.environ.get("SUBMITIT_EXECUTOR") == "local":
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


def _submitted(executor: Any, cluster: Cluster, slot: int, row: Work) -> Any:
    if cluster.engine == "local" and cluster.gpus:
        own = range(slot * cluster.gpus, (slot + 1) * cluster.gpus)
        executor.update_parameters(visible_gpus=list(own))
    if cluster.engine != "local":
        return executor.submit(*row.call)
    # What begins now ignores a terminal's Ctrl-C: the command ends it in its own way.
    before = on_signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return executor.submit(*row.call)
    finally:
        on_signal(signal.SIGINT, before)


def _result(submitit: Any, job: Any) -> Ended:
    """Return what an ended job returned; one that was killed was stopped too."""
    try:
        return job.result()
    except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return Ended(lines[-1].strip()[:200] if lines else type(error).__name__, stopped=True)


def _submitit() -> Any:
    try:
        import submitit  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    except ImportError:
        raise WakefulError(
            "--cluster needs the package submitit: pip install 'wakeful[cluster]'"
        ) from None
    return submitit


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
