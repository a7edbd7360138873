"""Runs of several processes, for the tests: `torchrun` with `wakeful train`, or with this file."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENDS_WITHIN = 60.0
"""Seconds in which all processes are gone after one is: torchrun's grace of 30 and some slack."""


ONE_MACHINE = ("--standalone",)


def start(
    processes: int,
    *arguments: str,
    module: str = "wakeful",
    meeting: tuple[str, ...] = ONE_MACHINE,
) -> subprocess.Popen[str]:
    """Start `torchrun -m MODULE ARGUMENTS` with so many processes on one machine.

    `meeting` has torchrun's options that say where several machines meet.
    """
    here = Path(__file__).parents[1]
    paths = [str(here), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *meeting,
         "--nproc-per-node", str(processes), "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


def ended(process: subprocess.Popen[str], *, timeout: float = 240) -> tuple[int, str, str]:
    """Wait for the processes; return the exit status and what they wrote."""
    try:
        out, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        raise
    return process.returncode, out, errors


def error_lines(text: str, verb: str = "train") -> list[str]:
    """Return the lines that wakeful itself wrote as errors."""
    return [line for line in text.splitlines() if line.startswith(f"wakeful {verb}:")]


def workers(process: subprocess.Popen[str]) -> dict[int, int]:
    """Return the process number of each rank."""
    actual: dict[int, int] = {}
    for children in Path(f"/proc/{process.pid}/task").glob("*/children"):
        for child in children.read_text().split():
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                ranks = [entry[5:] for entry in variables if entry.startswith(b"RANK=")]
                actual |= {int(rank): int(child) for rank in ranks}
    return actual


def wait_for_rows(run: Path, rows: int) -> None:
    """Wait until a run has written so many rows of metrics."""
    deadline = time.monotonic() + 120
    metrics = run / "metrics.jsonl"
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < rows:
        assert time.monotonic() < deadline, "the run did not get there"
        time.sleep(0.005)


class Stop(Exception):
    """Ends a run early, on all processes alike."""


@contextlib.contextmanager
def stopped_at(step: int) -> Iterator[None]:
    """Make every process fail when it comes to the step after `step`."""
    from wakeful.data.order import Batches

    real = Batches.batch

    def batch(self: Batches, number: int) -> Any:
        if number == step:
            raise Stop
        return real(self, number)

    Batches.batch = batch
    try:
        with contextlib.suppress(Stop):
            yield
    finally:
        Batches.batch = real


@contextlib.contextmanager
def bad_batch(step: int, rank: int) -> Iterator[None]:
    """Make the loss of one process NaN in one step."""
    import torch

    from wakeful.model.decoder import Decoder
    from wakeful.runs.distributed import started_as

    real, calls = Decoder.loss, []

    def loss(self: Decoder, *arguments: torch.Tensor, **options: str) -> torch.Tensor:
        value = real(self, *arguments, **options)  # pyright: ignore[reportArgumentType]
        calls.append(torch.is_grad_enabled())
        bad = sum(calls) == step and calls[-1] and started_as()[0] == rank
        return value * float("nan") if bad else value

    Decoder.loss = loss
    try:
        yield
    finally:
        Decoder.loss = real


def main(job: Path) -> None:
    """Train everything that a job file lists, one after the other, in the same processes.

    A job is {"out", "config", "resume", "initial" (a run), "stop" (a step), "nan" (a step and a
    rank)}; an error that all processes raise alike is written to OUT.error.
    """
    import torch

    from wakeful.config.schema import Config, config_from_table
    from wakeful.errors import WakefulError
    from wakeful.loading.load import read_decoder
    from wakeful.runs.distributed import join_processes
    from wakeful.training.loop import Initial, train_run

    with join_processes() as world:
        for call in json.loads(job.read_text()):
            config = config_from_table(call["config"]) if call["config"] else Config()
            with contextlib.ExitStack() as stack:
                if call["stop"]:
                    stack.enter_context(stopped_at(call["stop"]))
                if call["nan"]:
                    stack.enter_context(bad_batch(*call["nan"]))
                initial = None
                if call["initial"]:
                    decoder = read_decoder(call["initial"], dtype="auto").decoder()
                    if not world.first:  # the first one's weights are those that count
                        state = decoder.state_dict()
                        decoder.load_state_dict({k: torch.zeros_like(t) for k, t in state.items()})
                    initial = Initial(decoder, {"from": call["initial"]})
                try:
                    train_run(config, call["out"], resume=call["resume"], initial=initial)
                except WakefulError as error:
                    if world.first:
                        Path(call["out"] + ".error").write_text(str(error))
            world.gather("done")


if __name__ == "__main__":
    from wakeful.runs.distributed import end_process

    main(Path(sys.argv[1]))
    end_process(0)
