"""A step of training or healing shared by two processes, against one; each has one thread."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.timing import Ratio
from benchmarks.waits import write_text

FEW = 3
"""First steps that are not counted: threads, memory and files are new to them."""
SIZES = {"num_layers": 6, "num_heads": 6, "width": 384, "mlp_width": 1024, "max_length": 256}
"""10.6 million parameters in blocks: 4,096 tokens a step take a core seconds."""
LAYOUTS = ("fsdp", "ddp")
KINDS = ("training", "healing")


def ratios(
    sizes: Mapping[str, int] = SIZES, *, steps: int = 9, batch: int = 16, rounds: int = 3
) -> Iterator[Ratio]:
    """Yield seconds a token, two processes over one, in turns; 1 / 0.588 is 1.7 times as fast.

    Healing learns from a teacher of twice the layers, which each process has its share of.
    """
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        write_text(place / "text", documents=200)
        deeper = {**sizes, "num_layers": 2 * sizes["num_layers"]}
        _trained(place / "teacher", _table(place / "text", deeper, FEW + 1, 1, "one"), 1)
        found: dict[tuple[str, str], list[float]] = {}
        for number, kind, layout in product(range(rounds), KINDS, ("one", *LAYOUTS)):
            table = _table(place / "text", sizes, steps, batch, layout)
            if kind == "healing":
                table["train"]["distill"] = {"teacher": str(place / "teacher"), "alpha": 0.0}
            took = _trained(place / f"{kind}-{layout}-{number}", table, 1 + (layout != "one"))
            found.setdefault((kind, layout), []).append(took)
        for kind, layout in product(KINDS, LAYOUTS):
            mine, one = found[kind, layout], found[kind, "one"]
            each = sorted(two / alone for two, alone in zip(mine, one, strict=True))
            tokens = batch * sizes["max_length"]
            yield Ratio(
                f"a step of {kind} of two processes, {layout}", "of one", statistics.median(each),
                each[0], each[-1], statistics.median(mine) * tokens,
                statistics.median(one) * tokens, "<= 0.588",
            )  # fmt: skip


def _table(
    text: Path, sizes: Mapping[str, int], steps: int, batch: int, layout: str
) -> dict[str, Any]:
    return {
        "model": dict(sizes),
        "data": {"source": str(text), "vocab_size": 280, "validation_fraction": 0.1},
        "train": {
            "steps": steps, "batch_size": batch, "length": sizes["max_length"], "device": "cpu",
            "eval_every": steps, "checkpoint_every": steps,
            "parallel": layout if layout in LAYOUTS else "fsdp",
        },
    }  # fmt: skip


def _trained(folder: Path, table: dict[str, Any], processes: int) -> float:
    """Train in processes of their own; return the median seconds a token of the later steps."""
    config = folder.with_suffix(".toml")
    config.write_text(tomli_w.dumps(table))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    launcher = torchrun if processes > 1 else []
    command = [sys.executable, "-m", *launcher, "wakeful", "train", str(config)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "WAKEFUL_CACHE": str(folder.parent / "cache"),
    }
    subprocess.run(
        [*command, "--out", str(folder)], check=True, capture_output=True, env=environment
    )
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    return statistics.median(1 / row["tokens_per_second"] for row in rows[FEW:])
