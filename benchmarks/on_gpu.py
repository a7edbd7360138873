"""What one GPU shows in 25 minutes, most valuable first: `python -m benchmarks.on_gpu [FOLDER]`.

Every step is a process of its own with a time of its own. What it prints, and a line of it in
summary.json, is written as soon as it ends, so whatever has run stays when the machine is taken.

Of Value Residual Learning it runs table 5, losses at three sizes: table 4 only lists these models.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from wakeful.device import H100
from wakeful.errors import WakefulError
from wakeful_papers.exhibits.exhibit import exhibit
from wakeful_papers.exhibits.plan import Plan
from wakeful_papers.exhibits.total import total_of
from wakeful_papers.options import ReproduceOptions
from wakeful_papers.verbs.reproduce import planned

TOTAL = 25 * 60
"""Seconds of all steps together."""
STEP_SECONDS = 0.02
"""Of an optimizer step however small the model: kernels take so long to start."""
LEAST_SHARE = 0.1
"""Of a scale's steps, below which its runs say less than all of a smaller scale's."""

ARENA = (
    "compare", "arena-124m", "--only", "vanilla", "wakeful-best", "--train.device", "cuda",
    "--train.steps", "60", "--train.batch_size", "64", "--train.eval_every", "60",
    "--train.diagnose.every", "60",
    "--optimizer.warmup_steps", "10", "--data.source", "python-stdlib", "--data.tokenizer", "",
    "--data.vocab_size", "8192", "--data.max_bytes", "20_000_000",
)  # fmt: skip
"""Two rows of `arena-124m`: 4 million tokens each, of text at hand."""


@dataclass(frozen=True)
class Step:
    """A command, and the seconds that it may take."""

    name: str
    seconds: float
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """A step that has ended."""

    name: str
    status: str
    """"done", "failed" with the exit status, or "cut off"."""
    seconds: float
    command: str
    last: str
    """The last line it printed."""


def steps_for(memory: int) -> list[Step]:
    """Return the steps on a GPU of so many bytes, most valuable first.

    An exhibit runs at the largest scale whose runs fit into the memory and, with no less than
    `LEAST_SHARE` of their steps, into its time.
    """
    python = sys.executable
    found = [
        Step("speed", 270, (python, "-m", "benchmarks", "speed")),
        Step(
            "tests",
            210,
            (
                python,
                "-m",
                "pytest",
                "-q",
                "-m",
                "gpu",
                "tests/model",
                "tests/training/test_training_gpu.py",
            ),
        ),
    ]
    for name, budget in (("activation/table2", 330), ("value-residual/table5", 330)):
        scale, count = fitting(name, budget, memory)
        command = (python, "-m", "wakeful", "reproduce", name, "--scale", scale)
        command += ("--device", "cuda", "--dtype", "bfloat16", "--steps", str(count))
        command += ("--out", f"runs/gpu/{name.replace('/', '-')}-{scale}-{count}")
        if scale == "paper":  # whose text and tokenizer are the hub's
            command += ("--text", "python-stdlib", "--tokenizer", "train")
        found.append(Step(name, budget, command))
    found.append(Step("ratios", 240, (python, "-m", "benchmarks", "gpu")))
    return [*found, Step("arena-124m", 120, (python, "-m", "wakeful", *ARENA))]


def fitting(name: str, budget: float, memory: int) -> tuple[str, int]:
    """Return the largest scale that fits into memory and seconds, and the baseline's steps there.

    Raises:
        WakefulError: not even the tiny one fits into the memory.
    """
    for scale in ("paper", "small", "tiny"):
        plan = planned(exhibit(name), ReproduceOptions(scale=scale))
        if plan.memory > memory:
            continue
        whole = plan.jobs[0].config.train.steps
        steps = min(whole, int(whole * budget / seconds_of(plan)))
        if steps >= LEAST_SHARE * whole or scale == "tiny":
            return scale, max(2, steps)
    raise WakefulError(f"{name} does not fit into {memory / 1e9:.1f} GB at any scale")


def seconds_of(plan: Plan) -> float:
    """Return about how long an exhibit's training takes on one H100."""
    steps = {job.folder: job.config.train.steps for job in plan.jobs}
    taken = total_of([plan]).operations / H100
    return max(taken, len(plan.seeds) * sum(steps.values()) * STEP_SECONDS)


def carry_out(
    steps: Sequence[Step],
    folder: Path,
    *,
    run: Callable[..., Any] = subprocess.run,
    clock: Callable[[], float] = time.monotonic,
    total: float = TOTAL,
) -> list[Outcome]:
    """Run the steps in order while time is left; write what each printed as soon as it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    began, found = clock(), list[Outcome]()
    for step in steps:
        left = total - (clock() - began)
        if left <= 0:
            found.append(Outcome(step.name, "no time left", 0.0, " ".join(step.command), ""))
        else:
            found.append(_carried_out(step, min(left, step.seconds), folder, run, clock))
        print(f"{step.name}: {found[-1].status}; {found[-1].last}", flush=True)
        table = json.dumps([asdict(each) for each in found], indent=2)
        (folder / "summary.json").write_text(table + "\n", encoding="utf-8")
    return found


def _carried_out(
    step: Step, limit: float, folder: Path, run: Callable[..., Any], clock: Callable[[], float]
) -> Outcome:
    path = folder / f"{step.name.replace('/', '-')}.txt"
    began = clock()
    with path.open("wb") as file:
        try:
            done = run(step.command, stdout=file, stderr=subprocess.STDOUT, timeout=limit)
            status = "done" if done.returncode == 0 else f"failed ({done.returncode})"
        except subprocess.TimeoutExpired:
            status = f"cut off after {limit:.0f} s"
    lines = path.read_text("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return Outcome(step.name, status, clock() - began, " ".join(step.command), last[:300])


def main(arguments: Sequence[str]) -> int:
    """Run all steps into a folder; return the exit status."""
    if not torch.cuda.is_available():
        print("there is no GPU: torch sees none on this machine, so nothing was run")
        return 1
    folder = Path(arguments[0] if arguments else "runs/gpu")
    free = torch.cuda.mem_get_info()[0]
    outcomes = carry_out(steps_for(free), folder)
    print(f"written to {folder}")
    return 0 if all(each.status == "done" for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
