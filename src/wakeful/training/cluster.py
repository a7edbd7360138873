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
"""A run fails when so many of its jobs in a row have ended without having saved a step."""
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
    return Work(label, folder, (train_from_table, config_to_table(config), str(folder)))


def cluster_of(expression: str) -> Cluster:
    """Return the cluster that an expression such as "local(workers=2)" names.

    Raises:
        WakefulError: the expression names no cluster, an option is out of its range, submitit is
            not installed, or SLURM is named and this machine has no `srun`.
    """
    engines = {"local": _local_cluster, "slurm": _slurm_cluster}
    # `build_call` leaves the first argument to its caller: the expression, which these two ignore.
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
    pieces: Sequence[Work],
    cluster: Cluster,
    folder: Path,
    show: Display,
    *,
    may_diverge: Container[str] = (),
    may_fail: bool = False,
) -> dict[str, str]:
    """Run each unfinished piece of work in a job of its own, at most `cluster.workers` at a time;
    return the faults of the pieces that failed, by label.

    A piece whose job is stopped before it is done continues in a new job, from its newest
    checkpoint. A piece may diverge if `may_diverge` has its label, and with `may_fail` every piece
    may fail: the other pieces go on without it. Any other failure ends all jobs.

    Logs go to a new folder below `folder`/jobs. All machines must see it and the pieces' folders.
    It is new because submitit unpickles results from there, and an older file might hold code.

    Raises:
        WakefulError: a piece failed that must not, or its jobs kept ending before they saved a
            step.
        Interrupted: SIGTERM arrived.
    """
    submitit, logs = _import_submitit(), folder / "jobs" / secrets.token_hex(8)
    jobs = dict[int, tuple[Work, Any]]()  # by slot
    refuse_link(logs.parent)
    with disk_errors(logs):
        logs.mkdir(parents=True)
    with ExitStack() as cleanup:
        executor = _make_executor(submitit, cluster, logs)
        unfinished = [piece for piece in pieces if not piece.done]
        queue = _Queue(unfinished, logs, may_diverge, may_fail)
        handler_before = set_signal_handler(signal.SIGTERM, _stop)
        # At the end, callbacks run in reverse order: jobs first, then the handler.
        cleanup.callback(set_signal_handler, signal.SIGTERM, handler_before)
        cleanup.callback(lambda: _end_jobs([job for _, job in jobs.values()], cluster))
        while queue.waiting or jobs:
            for slot in range(cluster.workers):  # a slot also says which GPUs a local job has
                if slot not in jobs and (piece := queue.take()):
                    jobs[slot] = piece, _submit(executor, cluster, slot, piece)
            for slot, (piece, job) in list(jobs.items()):
                if job.done():
                    del jobs[slot]
                    queue.take_result(piece, _job_result(submitit, job), show)
            time.sleep(_PAUSE[cluster.engine] if jobs else 0)
    return queue.faults


class _Queue:
    """Work that waits for a job, and the outcomes of the rest."""

    def __init__(
        self,
        pieces: Sequence[Work],
        logs: Path,
        may_diverge: Container[str],
        may_fail: bool,
    ) -> None:
        """Queue unfinished pieces of work, whose jobs write their logs to the folder `logs`.

        `may_diverge` and `may_fail` are those of `distribute_work`.
        """
        self.waiting, self.total, self.logs = list(pieces), len(pieces), logs
        self.may_diverge, self.may_fail = may_diverge, may_fail
        self.remaining = {piece.label for piece in pieces}
        """Labels of the pieces that have not ended: they wait, or their job runs."""
        self.faults: dict[str, str] = {}
        """By label: the faults of pieces that failed and were allowed to."""
        self.tries: collections.Counter[str] = collections.Counter()
        """By label: the number of jobs in a row that ended without having saved a step."""
        self.saved: dict[str, set[str]] = {}
        """By label: the checkpoints that were there when the piece's last job began."""

    def take(self) -> Work | None:
        """Remove the first waiting piece that may begin and return it; return None if there is
        none.

        A piece may begin when the pieces that it comes `after` have ended. Its checkpoints are
        noted, so that `take_result` sees whether its job saves one.
        """
        for piece in self.waiting:
            if self.remaining.isdisjoint(piece.after):
                self.waiting.remove(piece)
                self.saved[piece.label] = _checkpoints_of(piece.folder)
                return piece
        return None

    def take_result(self, piece: Work, result: JobResult, show: Display) -> None:
        """Record the result of a piece whose job has ended, and show it as a note.

        A piece whose job was stopped goes to the front of the queue, unless `TRIES` jobs in a row
        have ended without having saved a step.

        Raises:
            WakefulError: the piece failed and must not.
        """
        label, fault = piece.label, result.fault
        if not fault or piece.done:  # it may be done with a fault: a signal after the last step
            self.remaining.discard(label)
            show.note(f"{label} is done ({self.total - len(self.remaining)} of {self.total})")
            return
        if result.stopped:
            if _checkpoints_of(piece.folder) != self.saved[label]:  # it has saved a step
                self.tries[label] = 0
            else:
                self.tries[label] += 1
            if self.tries[label] < TRIES:
                show.note(f"{label}: its job ended ({fault}); it goes on in another")
                self.waiting.insert(0, piece)
                return
            fault = (
                f"{TRIES} jobs in a row ended before they had saved a step, the last with {fault}; "
                f"see {self.logs}, then give the same command again"
            )
        tolerated = self.may_fail or (result.diverged and label in self.may_diverge)
        if not tolerated:
            error_class = Diverged if result.diverged else WakefulError
            raise error_class(f"{label}: {fault}")
        show.note(f"{label}: {fault}; the others go on without it")
        self.faults[label] = fault
        self.remaining.discard(label)


def _checkpoints_of(folder: Path) -> set[str]:
    """Return the paths of the checkpoints; they change while a run continues."""
    return {path.as_posix() for path in folder.rglob("step-*")}


def _end_jobs(jobs: Sequence[Any], cluster: Cluster) -> None:
    """Cancel jobs; local ones first get `_SAVES` seconds to save their current step.

    SLURM gives its jobs such a time itself.
    """
    if cluster.engine == "local":
        for job in jobs:
            # Submitit's `cancel` would kill a worker one second after SIGINT. The process that
            # watches the worker passes SIGTERM on to it and waits.
            job._process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _SAVES
        while time.monotonic() < deadline and not all(job.done() for job in jobs):
            time.sleep(_PAUSE["local"])
        jobs = [job for job in jobs if not job.done()]
    for job in jobs:
        job.cancel()


def _stop(number: int, frame: Any) -> None:
    raise Interrupted(
        "stopped by SIGTERM, and its jobs are canceled",
        "give the same command again, a comparison with --resume",
    )


def train_from_table(table: Mapping[str, Any], folder: str) -> JobResult:
    """Train a run in `folder`, or continue the run there; `table` is its configuration.

    Users' modules that the configuration names are imported: the user wrote it. A resumed run does
    not import them itself, and a job is a new process without them.
    """

    def work() -> None:
        config = config_from_table(table)
        admit_parts(config)
        train_run(config, folder, resume=(Path(folder) / "run.json").is_file())

    return job_result(work)


def run_call(call: Call) -> JobResult:
    """Call a function with its arguments and return its result: what a job does."""
    function, *arguments = call
    return function(*arguments)


def job_result(work: Callable[[], object]) -> JobResult:
    """Call `work` in a job and return the job's result: without a fault if `work` returns.

    `Interrupted` counts as stopped, and `WakefulError` is the fault. Other errors are raised.
    """
    if os.environ.get(_ENGINE) == "local":
        # A process group of its own: a terminal's Ctrl-C must reach only the command that started
        # this job and ends it.
        os.setpgrp()
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


def _submit(executor: Any, cluster: Cluster, slot: int, piece: Work) -> Any:
    """Submit the job of a piece of work and return the job.

    A local job uses the GPUs of its slot and its share of the cores. `slot` is a number below
    `cluster.workers` that no other running job has.
    """
    if cluster.engine != "local":
        return executor.submit(run_call, piece.call)
    if cluster.gpus:
        gpus = range(slot * cluster.gpus, (slot + 1) * cluster.gpus)
        executor.update_parameters(visible_gpus=list(gpus))
    # The job's process inherits that Ctrl-C is ignored: this command ends the job in its own way.
    handler_before = set_signal_handler(signal.SIGINT, signal.SIG_IGN)
    try:
        with _divide_cores(cluster.workers):
            return executor.submit(run_call, piece.call)
    finally:
        set_signal_handler(signal.SIGINT, handler_before)


@contextmanager
def _divide_cores(workers: int) -> Iterator[None]:
    """Let processes that are started inside the context use 1 / `workers` of the cores.

    Sets OMP_NUM_THREADS for that time, unless the user has set it.
    """
    if THREADS in os.environ:
        yield
        return
    num_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        num_cores = len(os.sched_getaffinity(0))  # this process may be bound to some of the cores
    os.environ[THREADS] = str(max(1, num_cores // workers))
    try:
        yield
    finally:
        del os.environ[THREADS]


def _job_result(submitit: Any, job: Any) -> JobResult:
    """Return the result of an ended job.

    A job without a result was killed and counts as stopped; its fault is the last line of
    submitit's error.
    """
    try:
        return job.result()
    except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        fault = lines[-1][:200] if lines else type(error).__name__
        return JobResult(fault, stopped=True)


def _import_submitit() -> Any:
    return import_optional("submitit", extra="cluster", wants="--cluster")


def _local_cluster(
    _expression: str, *, workers: int = 2, gpus: int = 0, hours: float = 720.0
) -> Cluster:
    """Return a cluster of at most `workers` processes of this machine at a time, each with `gpus`
    GPUs of its own.

    A job ends after `hours`, for submitit needs a limit; the default is a month.
    """
    parameters: dict[str, Any] = {"timeout_min": round(60 * hours), "gpus_per_node": gpus}
    return Cluster("local", workers, gpus, parameters)


def _slurm_cluster(
    _expression: str,
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
    """Return a cluster of at most `workers` SLURM jobs at a time, each on one machine with `gpus`
    GPUs, `cpus` cores and at most `hours` of time.

    The further options are SLURM's. SLURM chooses where `memory_gb` (a job's memory) is 0 or a name
    is empty.
    """
    named = {"partition": partition, "account": account, "qos": qos, "constraint": constraint}
    parameters: dict[str, Any] = {
        "name": "wakeful", "timeout_min": round(60 * hours), "gpus_per_node": gpus,
        "cpus_per_task": cpus,
    }  # fmt: skip
    if memory_gb:
        parameters["mem_gb"] = memory_gb
    parameters |= {f"slurm_{name}": value for name, value in named.items() if value}
    return Cluster("slurm", workers, gpus, parameters)
