"""Each command that a report names by "Next:" runs, and the commands that follow it, to the end.

A command is typed as it is printed, in the folder where the one before was typed. The chains end
where every command that is named has run already.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from benchmarks.small_models import grow

NEXT = re.compile(r"^Next: .*?\. ((?:wakeful|vllm) .*)$", re.MULTILINE)
ENGINES = ("vllm ",)
"""Commands of other programs, which stand in no environment for tests."""
MOST_COMMANDS = 40
"""A chain that names more has no end."""

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str) -> str:
    """Return what a command prints, which must succeed."""
    words = command.replace("wakeful", f"{sys.executable} -m wakeful", 1)
    process = subprocess.run(
        words, shell=True, capture_output=True, text=True, check=False, timeout=1800,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    output = process.stdout + process.stderr
    assert process.returncode == 0, f"{command}\n{output[-3000:]}"
    assert "Traceback" not in output, f"{command}\n{output[-3000:]}"
    return process.stdout


def follow(commands: Iterable[str]) -> list[str]:
    """Run commands and all that they name, once each; return what ran, in order."""
    waiting, done = list(commands), list[str]()
    while waiting:
        command = waiting.pop(0)
        if command in done or command.startswith(ENGINES):
            continue
        done.append(command)
        print(f"$ {command}", flush=True)
        assert len(done) <= MOST_COMMANDS, "no end:\n" + "\n".join(done)
        lines = NEXT.findall(run(command))
        for line in lines:
            print(f"    Next: {line}", flush=True)
        waiting += lines
    return done


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "gemma2"])
def test_each_next_line_of_a_diagnosis_runs(name: str, folder: Path) -> None:
    model = name
    if name != "smollm2":
        grow(name, folder / name)
        model = f"{name} --text {name}/backcopy.txt"
    done = follow([f"wakeful diagnose {model}"])
    verbs = {command.split()[1] for command in done}
    assert {"cure", "evaluate", "quantize"} <= verbs
    if name != "smollm2":  # which no scheme quantizes harmlessly: a rotation is named, no file
        assert "generate" in verbs


def test_each_next_line_of_training_and_inheritance_runs() -> None:
    small = "--train.steps 6 --train.batch_size 4 --train.length 64"
    done = follow([
        f"wakeful train cpu-tiny {small}",
        f"wakeful compare demo {small} --only vanilla softmax1",
        "wakeful report runs/compare-demo",
        "wakeful inherit runs/cpu-tiny --layers 4 --steps 4 --out runs/heir",
        "wakeful inherit runs/cpu-tiny --layers 4 --heal.by none --out runs/untrained",
        "wakeful export runs/cpu-tiny exported",
        'wakeful generate exported --prompt "import" --num_tokens 4',
    ])  # fmt: skip
    verbs = {command.split()[1] for command in done}
    assert {"diagnose", "quantize"} <= verbs
