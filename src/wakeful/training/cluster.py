"""Distribution of runs over processes or machines by submitit.

"local(workers=2)"                            processes of this machine
"slurm(workers=16, hours=12, partition='a')"  SLURM's jobs
"""

import collections
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakeful.config.rules import AtLeast, check_rules
from wakeful.config.schema import Config, config_from_table, config_to_table
from wakeful.errors import Diverged, Interrupted, WakefulError
from wakeful.runs.distributed import set_signal_handler
from wakeful.runs.run import disk_errors, is_done, refuse_link
from wakeful.terminal.display import Display
from wakeful.training.loop import train_run
from wakeful.training.setup import admit_parts
from wakeful.variants import build_call
from wakeful.variants.plugins import import_optional

TRIES = 3
"""Consecutive jobs of one run that may end without having saved a step."""
_PAUSE = {"local": 0.2, "slurm": 10.0}
"""Seconds between two checks of the jobs."""
_SAVES = 60.0
"""Seconds in which a worker of this machine ends its step and saves it."""
_ENGINE = "SUBMITIT_EXECUTOR"
"""Environment variable by which submitit names a job's launcher."""
THREADS = "OMP_NUM_THREADS"
"""Number of threads of torch."""


@dataclass(frozen=True)
class JobResult:
    """The result of a job."""

    fault: str = ""
    """The fault; empty where there was none."""
    stopped: bool = False
    """True where a signal ended the work, which continues in another job."""
    diverged: bool = False
    """True where training diverged, as it would again."""


Call = tuple[Callable[..., JobResult], *tuple[Any, ...]]
"""A function and its arguments."""


@dataclass(frozen=True)
class Cluster:
    """Engine of the jobs, and their number at a time."""

    engine: str
    workers: int
    gpus: int
    """GPUs of each worker."""
    parameters: Mapping[str, Any]
    """Parameters of submitit's executor."""


@dataclass(frozen=True)
class Work:
    """A piece of work; if its job ends before it is done, another job continues it."""

    label: str
    """Its name in messages."""
    folder: Path
    """The folder of its checkpoints."""
    call: Call
    """The function that the job calls, and its arguments."""
    after: Collection[str] = ()
    """Labels of the work that must have ended before it begins."""
    shows_done: bool = True
    """True where the run in its folder shows when it is done; otherwise only its job does."""

    @property
    def done(self) -> bool:
        """True where its folder shows that it is done."""
        return self.shows_done and is_done(self.folder)


def run_work(label: str, config: Config, folder: Path) -> Work:
    """Return the training of a run, from its newest checkpoint if there is one."""
    return Work(label, folder, (train_row, config_to_table(config), str(folder)))


def cluster_of(expression: str) -> Cluster:
    """Return the cluster that an expression names.

    Raises:
        WakefulError: it names none, an option is out of its range, submitit is not installed, or
            SLURM is not to be had here.
    """
    engines = {"local": _local_cluster, "slurm": _slurm_cluster}
    cluster: Cluster = build_call("cluster", engines, expression)(expression)
    check_rules(cluster, AtLeast("workers", 1), AtLeast("gpus", 0))
    _import_submitit()
    if cluster.engine == "slurm" and shutil.which("srun") is None:
        raise WakefulError(
            f"cluster = {expression}: there is no srun here; give the command on a machine that "
            "submits to SLURM"
        )
    return cluster


def distribute_work(
    rows: Sequence[Work],
    cluster: Cluster,
    folder: Path,
    show: Display,
    *,
    may_diverge: Container[str] = (),
    may_fail: bool = False,
) -> dict[str, str]:
    """Run unfinished rows in a job each, at most `cluster.workers` at a time; return the faults of
    those that failed, by label.

    A row whose job ends early continues in a new one, from its newest checkpoint. If a row labelled
    in `may_diverge` diverges, or with `may_fail` any row fails, the others continue.

    Logs go to a new folder below `folder`/jobs; all machines must see it and the rows' folders. It
    is new because submitit unpickles results from there, and a file from before might hold code.

    Raises:
        WakefulError: a row failed, or its jobs kept ending before they saved a step.
        Interrupted: SIGTERM arrived; the jobs are canceled.
    """
    submitit, logs = _import_submitit(), folder / "jobs" / secrets.token_hex(8)
    jobs = dict[int, tuple[Work, Any]]()
    refuse_link(logs.parent)
    with disk_errors(logs):
        logs.mkdir(parents=True)
    with ExitStack() as cleanup:
        executor = _make_executor(submitit, cluster, logs)
        remaining = [row for row in rows if not row.done]
        queue = _Queue(remaining, logs, may_diverge, may_fail)
        handler_before = set_signal_handler(signal.SIGTERM, _stop)
        cleanup.callback(set_signal_handler, signal.SIGTERM, handler_before)
        cleanup.callback(lambda: _end_jobs([job for _, job in jobs.values()], cluster))
        while queue.waiting or jobs:
            for slot in range(cluster.workers):  # a slot also says which GPUs a local job has
                if slot not in jobs and (row := queue.take()):
                    jobs[slot] = row, _submit(executor, cluster, slot, row)
            for slot, (row, job) in list(jobs.items()):
                if job.done():
                    del jobs[slot]
                    queue.take_result(row, _job_result(submitit, job), show)
            time.sleep(_PAUSE[cluster.engine] if jobs else 0)
    return queue.faults


class _Queue:
    """Work that waits for a job, and the outcomes of the rest."""

    def __init__(
        self,
        rows: Sequence[Work],
        logs: Path,
        may_diverge: Container[str],
        may_fail: bool,
    ) -> None:
        """Queue rows and count their tries; see `distribute_work` for the arguments."""
        self.waiting, self.total, self.logs = list(rows), len(rows), logs
        self.may_diverge, self.may_fail = may_diverge, may_fail
        self.remaining = {row.label for row in rows}
        """Labels of unfinished rows."""
        self.faults: dict[str, str] = {}
        self.tries: collections.Counter[str] = collections.Counter()
        """By label: the last jobs that ended without having saved a step."""
        self.saved: dict[str, set[str]] = {}
        """By label: the checkpoints that were there when the row's last job began."""

    def take(self) -> Work | None:
        """Remove and return the first waiting row that may begin: all work that it comes after has
        ended. None where none may.
        """
        for row in self.waiting:
            if self.remaining.isdisjoint(row.after):
                self.waiting.remove(row)
                self.saved[row.label] = _checkpoints_of(row.folder)
                return row
        return None

    def take_result(self, row: Work, result: JobResult, show: Display) -> None:
        """Record the result of a row whose job has ended.

        A row whose job was stopped by a signal waits again, at most `TRIES` times without having
        saved a step.

        Raises:
            WakefulError: the row failed and must not.
        """
        fault = result.fault
        if not fault or row.done:  # a signal may come after the last step
            self.remaining.discard(row.label)
            show.note(f"{row.label} is done ({self.total - len(self.remaining)} of {self.total})")
            return
        if result.stopped:
            if _checkpoints_of(row.folder) != self.saved[row.label]:  # it has saved a step
                self.tries[row.label] = 0
            self.tries[row.label] += 1
            if self.tries[row.label] < TRIES:
                show.note(f"{row.label}: its job ended ({fault}); it goes on in another")
                self.waiting.insert(0, row)
                return
            fault = (
                f"{TRIES} jobs in a row ended before they had saved a step, the last with {fault}; "
                f"see {self.logs}, then give the same command again"
            )
        tolerated = self.may_fail or (result.diverged and row.label in self.may_diverge)
        if not tolerated:
            raise (Diverged if result.diverged else WakefulError)(f"{row.label}: {fault}")
        show.note(f"{row.label}: {fault}; the others go on without it")
        self.faults[row.label] = fault
        self.remaining.discard(row.label)


def _checkpoints_of(folder: Path) -> set[str]:
    """Return the paths of the checkpoints; they change while a run continues."""
    return {path.as_posix() for path in folder.rglob("step-*")}


def _end_jobs(jobs: Sequence[Any], cluster: Cluster) -> None:
    """Cancel jobs; local ones first get the time to save their current step.

    SLURM gives its jobs that time itself. Submitit's local `cancel` kills a worker one second after
    SIGINT, but its controller passes SIGTERM on and waits.
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


def train_row(table: Mapping[str, Any], folder: str) -> JobResult:
    """Train the run of a configuration, given as a table, in `folder`, or continue it there.

    The modules that the configuration names are imported, since the user wrote it: a job is a new
    process, and resuming a run would import none.
    """

    def work() -> None:
        config = config_from_table(table)
        admit_parts(config)
        train_run(config, folder, resume=(Path(folder) / "run.json").is_file())

    return job_result(work)


def run_call(call: Call) -> JobResult:
    """Do a job's work."""
    function, *arguments = call
    return function(*arguments)


def job_result(work: Callable[[], object]) -> JobResult:
    """Do a job's work and return its result: a fault, if it was stopped or has failed."""
    if os.environ.get(_ENGINE) == "local":
        os.setpgrp()  # a terminal's Ctrl-C goes to the command, which ends this job
    try:
        work()
    except Interrupted:
        return JobResult("it was stopped", stopped=True)
    except WakefulError as error:
        return JobResult(str(error), diverged=isinstance(error, Diverged))
    return JobResult()


def _make_executor(submitit: Any, cluster: Cluster, logs: Path) -> Any:
    """Return submitit's executor for a cluster's jobs, which writes to the folder `logs`."""
    if cluster.engine == "local":  # AutoExecutor cannot give each job GPUs of its own
        executor = submitit.LocalExecutor(folder=logs)
    else:
        executor = submitit.AutoExecutor(folder=logs, cluster=cluster.engine)
    executor.update_parameters(**cluster.parameters)
    return executor


def _submit(executor: Any, cluster: Cluster, slot: int, row: Work) -> Any:
    """Submit a row's job and return it; a local one uses the GPUs of its slot."""
    if cluster.engine != "local":
        return executor.submit(run_call, row.call)
    if cluster.gpus:
        gpus = range(slot * cluster.gpus, (slot + 1) * cluster.gpus)
        executor.update_parameters(visible_gpus=list(gpus))
    # A process started now ignores a terminal's Ctrl-C: the command ends it in its own way.
    handler = set_signal_handler(signal.SIGINT, signal.SIG_IGN)
    try:
        with _divide_cores(cluster.workers):
            return executor.submit(run_call, row.call)
    finally:
        set_signal_handler(signal.SIGINT, handler)


@contextmanager
def _divide_cores(workers: int) -> Iterator[None]:
    """Let processes started inside use 1 / `workers` of the cores, unless the user set it."""
    if THREADS in os.environ:
        yield
        return
    num_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS: this process may have only some of them
        num_cores = len(os.sched_getaffinity(0))
    os.environ[THREADS] = str(max(1, num_cores // workers))
    try:
        yield
    finally:
        del os.environ[THREADS]


def _job_result(submitit: Any, job: Any) -> JobResult:
    """Return the result of an ended job; one without a result was killed, and counts as stopped."""
    try:
        return job.result()
    except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return JobResult(lines[-1].strip()[:200] if lines else type(error).__name__, stopped=True)


def _import_submitit() -> Any:
    return import_optional("submitit", extra="cluster", wants="--cluster")


def _local_cluster(
    _written: str, *, workers: int = 2, gpus: int = 0, hours: float = 720.0
) -> Cluster:
    """Return processes of this machine, each with `gpus` GPUs of its own.

    submitit needs a limit of time; the default is a month.
    """
    parameters: dict[str, Any] = {"timeout_min": round(60 * hours), "gpus_per_node": gpus}
    return Cluster("local", workers, gpus, parameters)


def _slurm_cluster(
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
    """Return a cluster of SLURM jobs, each on one machine with `gpus` GPUs and `cpus` cores.

    `memory_gb` is a job's memory; 0, as an empty name, leaves it to SLURM.
    """
    named = {"partition": partition, "account": account, "qos": qos, "constraint": constraint}
    parameters: dict[str, Any] = {
        "name": "wakeful", "timeout_min": round(60 * hours), "gpus_per_node": gpus,
        "cpus_per_task": cpus,
    }  # fmt: skip
    parameters |= {"mem_gb": memory_gb} if memory_gb else {}
    parameters |= {f"slurm_{name}": value for name, value in named.items() if value}
    return Cluster("slurm", workers, gpus, parameters)
