"""Measure the cells of the table, each in its tool's environment, and print it."""

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.peers.formats import FORMATS
from benchmarks.peers.table import tables
from wakeful.loading.load import load
from wakeful.loading.model import Model

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = {
    "wakeful": [],
    "llmcompressor": ["llmcompressor[higgs]>=0.14.1a20261020,<0.16", "pulp<3"],
    "torchao": ["torchao==0.18.0"],
    "modelopt": ["nvidia-modelopt[hf]==0.47.0"],
}  # fmt: skip
"""What pip installs beside wakeful, a tool an environment: their versions of Transformers clash."""
METHODS = {
    "wakeful": (
        "rtn", "gptq", "smoothquant", "cured", "cured, gptq", "stock, gptq", "chosen, gptq",
        "chosen, gptq, tuned",
    ),
    "llmcompressor": (
        "rtn", "gptq", "awq", "autoround", "smoothquant", "smoothquant, gptq", "rotated",
        "rotated, gptq", "chosen, gptq", "chosen, gptq, distilled",
    ),
    "torchao": ("rtn",),
    "modelopt": ("rtn", "awq", "smoothquant"),
}  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Run what is missing, a cell at a time, and print the tables."""
    asked = _parser().parse_args(arguments)
    out = Path(asked.out).resolve()  # cells run elsewhere
    (out / "cells").mkdir(parents=True, exist_ok=True)
    model = load(asked.model)
    assert model.path is not None
    texts, calibration = _windows(model, asked)
    shared = {
        "model": str(model.path.resolve()), "texts": texts, "calibration": calibration,
        "threads": asked.threads, "device": asked.device, "first": model.bos, "steps": asked.steps,
        "tasks": dict(_tasks(model, asked.piqa, asked.lambada, asked.items)),
    }  # fmt: skip
    del model

    def measure(cell: tuple[str, str, str]) -> None:
        _measure(*cell, asked, shared, out)

    missing = [
        cell for cell in (("wakeful", "", ""), *_cells(asked)) if not _path(out, *cell).exists()
    ]
    for tool in {tool for tool, _, _ in missing}:  # before cells that run at once ask for it
        asked.python[tool] = asked.python.get(tool) or _environment(tool, out)
    with ThreadPoolExecutor(asked.at_once) as pool:
        list(pool.map(measure, missing))
    print(tables(out / "cells"))


def _path(out: Path, tool: str, method: str, form: str) -> Path:
    """Return where a cell's figures are; without a method, those of the model in full precision."""
    name = f"{tool}-{method}-{form}".replace(", ", "+") if method else "plain"
    return out / "cells" / f"{name}.json"


def _measure(
    tool: str, method: str, form: str, asked: argparse.Namespace, shared: dict[str, Any], out: Path
) -> None:
    """Measure a cell in a process of its own."""
    path = _path(out, tool, method, form)
    task = path.with_suffix(".job")
    job = shared | {"tool": tool, "method": method, "format": form, "out": str(path)}
    task.write_text(json.dumps(job), "utf-8")
    print(path.stem, flush=True)
    with path.with_suffix(".log").open("w") as log:
        done = subprocess.run(
            [asked.python[tool], "-m", "benchmarks.peers.cell", str(task)],
            cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False,
            env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": str(asked.threads)},
        )  # fmt: skip
    task.unlink()
    if not path.exists():
        path.write_text(json.dumps({"failed": f"it stopped with status {done.returncode}"}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.peers", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--text", nargs="+", required=True, help="the first calibrates too")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--calibration", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--piqa", default="", help="its .jsonl; the labels lie beside it (.lst)")
    parser.add_argument("--lambada", default="", help="its .jsonl")
    parser.add_argument("--items", type=int, default=200, help="of each task")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--tools", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--methods", nargs="+", default=[], help="of those that a tool has")
    parser.add_argument("--steps", type=int, default=200, help="of AutoRound a block, or of tuning")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--at_once", type=int, default=1, help="cells that run side by side")
    parser.add_argument("--out", default="runs/peers")
    parser.add_argument(
        "--python", nargs="+", default={}, action=_Pairs, metavar="TOOL=PYTHON",
        help="an environment that is there already",
    )  # fmt: skip
    return parser


class _Pairs(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, dict(value.split("=", 1) for value in values))


def _cells(asked: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    for form in asked.formats:
        for tool in asked.tools:
            for method in METHODS[tool]:
                meant = FORMATS[form]
                rounds = method not in ("rtn", "cured", "rotated")  # weights, by a method
                smooth = method.startswith("smoothquant")  # for the sake of inputs
                if (rounds and meant.cache) or (smooth and not (meant.inputs or meant.block)):
                    continue
                if method.startswith("chosen") != bool(meant.bits):
                    continue
                if not asked.methods or method in asked.methods:
                    yield tool, method, form


def _windows(
    model: Model, asked: argparse.Namespace
) -> tuple[dict[str, list[list[int]]], list[list[int]]]:
    """Return each text's first windows, and of the first text those that follow, to calibrate."""
    texts: dict[str, list[list[int]]] = {}
    rest: list[list[int]] = []
    for file in map(Path, asked.text):
        count = asked.windows + (0 if texts else asked.calibration)
        ids = model.tokenizer.encode(file.read_text("utf-8")[: count * asked.length * 12])
        rows = [ids[n * asked.length : (n + 1) * asked.length] for n in range(count)]
        if len(rows[-1]) < asked.length:
            sys.exit(f"{file} has {len(ids):,} tokens: {count * asked.length:,} are needed")
        texts[file.stem] = rows[: asked.windows]
        rest = rest or rows[asked.windows :]
    return texts, rest


def _tasks(model: Model, piqa: str, lambada: str, count: int) -> Iterator[tuple[str, list[Any]]]:
    encode = model.tokenizer.encode
    if piqa:
        lines = Path(piqa).read_text("utf-8").splitlines()[:count]
        labels = Path(piqa).with_name(Path(piqa).stem + "-labels.lst").read_text().split()
        items = []
        for line, label in zip(map(json.loads, lines), labels, strict=False):
            endings = [" " + line["sol1"], " " + line["sol2"]]
            items.append({
                "start": encode(f"Question: {line['goal']}\nAnswer:"), "right": int(label),
                "endings": [encode(each) for each in endings],
                "sizes": [len(each.encode()) for each in endings],
            })  # fmt: skip
        yield "piqa", items
    if lambada:
        items = []
        for line in map(json.loads, Path(lambada).read_text("utf-8").splitlines()[:count]):
            start, _, last = line["text"].rpartition(" ")
            items.append({
                "start": encode(start), "right": 0, "endings": [encode(" " + last)], "sizes": [1]
            })  # fmt: skip
        yield "lambada", items


def _environment(tool: str, out: Path) -> str:
    """Return the Python of a tool's environment, which is made where it is missing."""
    folder = out / "environments" / tool
    python = folder / "bin" / "python"
    if tool == "wakeful":
        return sys.executable
    if not python.exists():
        print(f"installing {tool} into {folder}", flush=True)
        venv.create(folder, with_pip=True)
        pinned = next(
            line for line in (ROOT / "constraints.txt").read_text().splitlines()
            if line.startswith("torch==")
        )  # fmt: skip
        asked = [pinned, *ENVIRONMENTS[tool]]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *asked], check=True)
    return str(python)


if __name__ == "__main__":
    main(sys.argv[1:])
