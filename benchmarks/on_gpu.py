"""What one GPU shows in 25 minutes, most valuable first.

    python -m benchmarks.on_gpu [FOLDER] [--text FOLDER_OF_TEXT] [--smoke]

Each question is asked of the largest of the papers' models that fits into the memory and takes
enough steps in its time, on the text given or the standard library. Every step is a process of its
own with a time of its own. What it prints, and a line of it in summary.json, is written as soon as
it ends, so whatever has run stays when the machine is taken. `--smoke` runs the same comparisons
with a model of no size on the CPU.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from wakeful.config.schema import Config, config_from_table
from wakeful.config.tables import merge_over_preset, merge_tables
from wakeful.errors import WakefulError
from wakeful_papers.exhibits.size import H100, run_size

TOTAL = 25 * 60
"""Seconds of all steps together."""
TOKENS_A_STEP = 65_536
LEAST_STEPS = 500
"""Below which a run is its early phase and little else."""
REACHED = 0.4
"""Share of an H100's expected speed that a plan counts on: the rest is tokenizing, evaluation,
measurements, and what a model that is not compiled loses."""
MOST_EPOCHS = 4
"""Passes over a text that are about as good as fresh text (Muennighoff et al. 2023)."""
BYTES_A_TOKEN = 3.0
"""Of a vocabulary of 8,192, roughly."""
STDLIB = 30_000_000
"""Bytes of the standard library's source, roughly."""
MOST_BYTES = 400_000_000
"""Read of a text: tokenizing more takes longer than the GPU has."""
ROOM = 0.9
"""Share of the memory that is counted on."""


@dataclass(frozen=True)
class Question:
    """Rows that are compared, and the papers' models to ask, the largest first."""

    name: str
    seconds: float
    presets: tuple[str, ...]
    rows: dict[str, dict[str, Any]]
    fields: dict[str, Any]
    """What all rows have in place of the preset's."""


QUESTIONS = (
    Question(
        "value residuals", 420,
        ("value-residual-468m", "value-residual-180m", "value-residual-82m", "value-residual-2m"),
        {"vanilla": {}, "resformer": {"model": {"route": "resformer"}},
         "svformer": {"model": {"route": "svformer"}}},
        {},
    ),
    Question(
        "softmax-1 and OrthoAdam", 360,
        ("activation-gpt2-1.4b", "activation-gpt2-350m", "activation-gpt2-130m",
         "activation-gpt2-60m"),
        {"vanilla": {}, "softmax1-orthoadam": {"model": {"normalizer": "softmax1"},
                                               "optimizer": {"name": "orthoadam"}}},
        {"train": {"quantize": {"schemes": ["moderate", "w4"], "num_sequences": 64}}},
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A command, and the seconds that it may take."""

    name: str
    seconds: float
    command: tuple[str, ...]
    file: str = ""
    """Where the command reads its comparison."""
    comparison: str = ""
    """What is written there first, TOML."""


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


def steps_for(memory: int, text: str, size: int, folder: Path) -> list[Step]:
    """Return the steps on a GPU of so many bytes with a text of `size` bytes, best first.

    It reads nothing of the machine: the same arguments are the same plan.
    """
    python = sys.executable
    tests = ("tests/model", "tests/training/test_training_gpu.py")
    return [
        Step("speed", 270, (python, "-m", "benchmarks", "speed")),
        *(asked(question, memory, text, size, folder) for question in QUESTIONS),
        Step("tests", 210, (python, "-m", "pytest", "-q", "-m", "gpu", *tests)),
        Step("ratios", 240, (python, "-m", "benchmarks", "gpu")),
    ]


def asked(question: Question, memory: int, text: str, size: int, folder: Path) -> Step:
    """Return the step that asks a question of the largest model that fits.

    Raises:
        WakefulError: not even the smallest fits into the memory.
    """
    for preset in question.presets:
        table = comparison(question, preset, text)
        config = config_from_table(merge_over_preset(table, preset))
        if run_size(config).memory > ROOM * memory:
            continue
        steps = steps_of(config, question.seconds / len(question.rows), size)
        if steps >= LEAST_STEPS or preset == question.presets[-1]:
            steps = max(2, steps)
            table["train"] |= {"steps": steps, "eval_every": steps}
            table["optimizer"] = {"warmup_steps": steps // 20}
            return step_of(question, table, preset, folder)
    raise WakefulError(f"{question.name}: no model fits into {memory / 1e9:.1f} GB")


def comparison(question: Question, preset: str, text: str) -> dict[str, Any]:
    """Return what all rows of a question have with a preset, as a table."""
    length = config_from_table(merge_over_preset({"preset": preset}, preset)).train.length
    shared: dict[str, Any] = {
        "preset": preset,
        "data": {"source": text, "tokenizer": "", "vocab_size": 8192, "max_bytes": MOST_BYTES,
                 "validation_source": "", "validation_fraction": 0.01},
        "train": {"batch_size": TOKENS_A_STEP // length, "micro_batch_size": 0,
                  "checkpoint_every": 0, "device": "cuda", "dtype": "bfloat16",
                  "diagnose": {"every": 0}},
    }  # fmt: skip
    shared["train"]["micro_batch_size"] = min(16, shared["train"]["batch_size"])
    return merge_tables(shared, question.fields)


def steps_of(config: Config, seconds: float, size: int) -> int:
    """Return the steps that a row has the time and the text for, on one H100."""
    tokens = TOKENS_A_STEP
    within = seconds * REACHED * H100 / (run_size(config).operations * tokens)
    met = MOST_EPOCHS * min(size, MOST_BYTES) / BYTES_A_TOKEN / tokens
    return int(min(within, met))


def step_of(question: Question, table: dict[str, Any], preset: str, folder: Path) -> Step:
    """Return the step that compares a question's rows; one row's steps are in its file."""
    name = f"{question.name}: {preset}"
    file = folder / f"{preset}.toml"
    command = (
        sys.executable, "-m", "wakeful", "compare", str(file), "--out", str(folder / preset),
    )  # fmt: skip
    whole = {"seeds": [0], **table, "variants": question.rows}
    return Step(name, question.seconds, command, str(file), toml(whole))


def toml(table: dict[str, Any], place: str = "") -> str:
    """Return a table as TOML: its values, then its tables under their own headings."""
    plain = {key: each for key, each in table.items() if not isinstance(each, dict)}
    lines = [f"[{place}]"] if place else []
    lines += [f"{key} = {json.dumps(each)}" for key, each in plain.items()]
    parts = [
        toml(each, f"{place}.{key}" if place else key)
        for key, each in table.items()
        if isinstance(each, dict)
    ]
    return "\n".join([*lines, "", *parts])


def smoke(folder: Path, text: str) -> list[Step]:
    """Return the same comparisons with a model of no size, for two steps on the CPU."""
    small = {
        "model": {"num_layers": 2, "num_heads": 2, "width": 16, "mlp_width": 32, "max_length": 16},
        "data": {"vocab_size": 300, "max_bytes": 300_000},
        "train": {"steps": 2, "eval_every": 2, "length": 16, "batch_size": 4,
                  "micro_batch_size": 4, "device": "cpu", "dtype": "float32"},
        "optimizer": {"warmup_steps": 1},
    }  # fmt: skip
    return [
        step_of(
            each, merge_tables(comparison(each, each.presets[-1], text), small),
            each.presets[-1], folder,
        )
        for each in QUESTIONS
    ]  # fmt: skip


def bytes_of(text: str) -> int:
    """Return the size of a text's files; of the standard library about that."""
    place = Path(text)
    if not place.exists():
        return STDLIB
    files = [place] if place.is_file() else place.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


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
    path = folder / f"{step.name.replace('/', '-').replace(': ', '-')}.txt"
    began = clock()
    if step.file:
        Path(step.file).write_text(step.comparison, encoding="utf-8")
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_gpu")
    parser.add_argument("folder", nargs="?", default="runs/gpu")
    parser.add_argument("--text", default="")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args(arguments)
    folder, text = Path(given.folder).absolute(), given.text or "python-stdlib"
    if given.text and not Path(text).exists():
        print(f"there is no text {text}: give --text (TEXT= of make) a folder or a file")
        return 1
    if given.smoke:
        steps = smoke(folder, text)
    elif not torch.cuda.is_available():
        print("there is no GPU: torch sees none on this machine, so nothing was run")
        return 1
    else:
        steps = steps_for(torch.cuda.mem_get_info()[0], text, bytes_of(text), folder)
    outcomes = carry_out(steps, folder)
    print(f"written to {folder}")
    return 0 if all(each.status == "done" for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
