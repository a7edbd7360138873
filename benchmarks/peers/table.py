"""The table of all cells, in Markdown."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.formats import FORMATS


def tables(folder: Path) -> str:
    """Return a table a format: each method's loss increase on each text, paired over windows."""
    plain = json.loads((folder / "plain.json").read_text("utf-8"))
    told = ["Loss in nats a token, in full precision: " + ", ".join(
        f"{name} {np.mean(losses):.4f}" for name, losses in plain["losses"].items()
    )]  # fmt: skip
    texts, tasks = list(plain["losses"]), list(plain["tasks"])
    head = ["tool", "method", *texts, *tasks, "seconds", "memory, GB", "file, MB"]
    for form, meant in FORMATS.items():
        rows = []
        for path in sorted(folder.glob(f"*-{form}.json")):
            tool, method = path.stem.removesuffix(f"-{form}").split("-", 1)
            found = json.loads(path.read_text("utf-8"))
            rows.append((_order(found, plain, texts), [tool, method.replace("+", ", "),
                         *_cells(found, plain, texts, tasks)]))  # fmt: skip
        if not rows:
            continue
        told += ["", f"### {form}: {meant.says}", "", _line(head), _line(["---"] * len(head))]
        told += [_line(cells) for _, cells in sorted(rows, key=lambda row: row[0])]
    return "\n".join(told)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _increase(found: Mapping[str, Any], plain: Mapping[str, Any], text: str) -> np.ndarray:
    return np.array(found["losses"][text]) - np.array(plain["losses"][text])


def _order(found: Mapping[str, Any], plain: Mapping[str, Any], texts: list[str]) -> float:
    if "failed" in found:
        return float("inf")
    return float(_increase(found, plain, texts[0]).mean())


def _cells(
    found: Mapping[str, Any], plain: Mapping[str, Any], texts: list[str], tasks: list[str]
) -> list[str]:
    if "failed" in found:
        return [f"not measured: {found['failed']}", *[""] * (len(texts) + len(tasks) + 2)]
    cells = []
    for text in texts:
        gaps = _increase(found, plain, text)
        cells.append(f"{gaps.mean():+.4f} ± {gaps.std(ddof=1) / np.sqrt(len(gaps)):.4f}")
    for task in tasks:
        now, then = (np.array(each["tasks"][task]) for each in (found, plain))
        error = (now - then).std(ddof=1) / np.sqrt(len(now))
        cells.append(f"{now.mean():.3f} ({(now - then).mean():+.3f} ± {error:.3f})")
    size = "–" if found["bytes"] is None else f"{found['bytes'] / 1e6:.1f}"
    return [*cells, f"{found['seconds']:.0f}", f"{found['peak'] / 1e9:.2f}", size]
