"""What `test_spread.py` has torchrun start: commands one after the other, or an accident."""

import json
import os
import signal
import sys
from pathlib import Path

from wakeful.cli import main
from wakeful.errors import WakefulError
from wakeful.world import joined, leave, started_as


def run_all(commands: list[list[str]]) -> None:
    """Run every command in the same processes; what it prints is told by each line's process."""
    with joined() as world:
        for command in commands:
            print(f"process {world.rank}: {main(command)}", flush=True)
            world.gather("done")


def harm(what: str, part: str, rank: int) -> None:
    """Kill a process, or make it fail, at its first sequence or once all are measured."""
    from wakeful.evaluation import diagnosis as diagnose

    def accident(*_: object) -> None:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise WakefulError("what only one process met")

    if started_as()[0] == rank:
        if part == "sequence":
            diagnose._loss = accident  # pyright: ignore
        else:
            diagnose.mean_and_error = accident  # pyright: ignore


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    if job["harm"]:
        harm(*job["harm"])
        leave(main(job["commands"][0]))
    run_all(job["commands"])
    leave(0)
