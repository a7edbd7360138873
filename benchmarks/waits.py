"""What a user waits for: a verb's help, and a page about a run. The peer is one second."""

import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.timing import Ratio, seconds
from wakeful.config.schema import config_from_table
from wakeful.reporting.tool import report
from wakeful.training.loop import train_run

VERBS = ("diagnose", "train", "inherit")
WORDS = ("def", "return", "value", "layer", "for", "in", "range", "self", "None", "x", "y", "= 1")


def ratios(verbs: tuple[str, ...] = VERBS, rounds: int = 7) -> Iterator[Ratio]:
    """Yield seconds until a verb's help is printed, and until a page about a run is written."""
    for verb in verbs:
        command = [sys.executable, "-m", "wakeful", verb, "--help"]
        yield _waited(
            f"wakeful {verb} --help",
            lambda command=command: subprocess.run(command, check=True, capture_output=True),
            rounds,
            "<= 0.30",
        )
    with tempfile.TemporaryDirectory() as place:
        folder = _run(Path(place))
        page = folder / "page.html"
        yield _waited("a page about a run", lambda: report(folder, out=page), rounds, "<= 0.50")


def _waited(name: str, run: Callable[[], object], rounds: int, target: str) -> Ratio:
    run()
    took = [seconds(run) for _ in range(rounds)]
    low, _, high = statistics.quantiles(took, n=4)
    middle = statistics.median(took)
    return Ratio(name, "one second", middle, low, high, middle, 1.0, target)


def write_text(folder: Path, documents: int = 60) -> Path:
    """Write documents of a few words at random into a new folder; return it."""
    folder.mkdir()
    chooser = random.Random(0)
    for number in range(documents):
        words = chooser.choices(WORDS, k=80)
        (folder / f"{number:03d}.txt").write_text(f"{' '.join(words)} {number}\n")
    return folder


def _run(place: Path) -> Path:
    """Train a tiny model and return its run directory."""
    text = write_text(place / "text")
    table = {
        "model": {"num_layers": 2, "num_heads": 2, "width": 16, "mlp_width": 24, "max_length": 32},
        "data": {"source": str(text), "vocab_size": 280, "validation_fraction": 0.1},
        "optimizer": {"lr": 3e-3, "final_lr": 3e-4, "warmup_steps": 2},
        "train": {"steps": 40, "batch_size": 4, "length": 16, "eval_every": 10, "device": "cpu"},
    }
    os.environ.setdefault("WAKEFUL_CACHE", str(place / "cache"))
    return train_run(config_from_table(table), place / "run").path
