"""Run every benchmark, or those named: `python -m benchmarks softmax1 training`."""

import sys
from collections.abc import Iterable
from importlib import import_module

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import Ratio
from wakeful.runs.run import environment

NAMES = (
    "softmax1", "memory", "training", "losses", "growth", "optimizer", "diagnose", "inspectors",
    "loading", "generation", "quantize", "cure", "peaks", "waits",
    "processes", "speed", "gpu",
)  # fmt: skip


def main(names: Iterable[str]) -> None:
    """Print one row a ratio, as soon as it is known, then the table."""
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 150)
    machine = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    console.print(f"{machine.device_name}, {machine.threads} threads, torch {machine.torch}")
    rows: list[tuple[str, Ratio]] = []
    for name in names:
        for row in import_module(f"benchmarks.{name}").ratios():
            rows.append((name, row))
            spread = f"[{row.low:.3f}, {row.high:.3f}]"
            console.print(
                f"{name}: {row.name} / {row.peer} = {row.ratio:.3f} {spread}", highlight=False
            )
        if name in ("speed", "gpu") and not torch.cuda.is_available():
            console.print(f"{name}: torch sees no GPU, so nothing was measured on one")
    table = Table("benchmark", "what", "against", "ratio", "quartiles", "seconds", "target")
    for name, row in rows:
        spread = f"{row.low:.3f} to {row.high:.3f}"
        seconds = f"{row.seconds:.4f} / {row.peer_seconds:.4f}"
        table.add_row(name, row.name, row.peer, f"{row.ratio:.3f}", spread, seconds, row.target)
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:] or NAMES)
