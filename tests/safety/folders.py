"""Copies of a folder in which one file has been damaged."""

import json
import shutil
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import pytest
import tomli_w

from damage import changed, changed_json, damaged, refusal
from wakeful.digests import file_sha256

TRIALS = [pytest.param(25, id="few"), pytest.param(1500, id="many", marks=pytest.mark.long)]


def damage_file(path: Path, random: Random) -> None:
    """Change one file as its kind can be: values, names, headers, bytes."""
    content = path.read_bytes()
    if path.suffix == ".json":
        content = changed_json(content, random)
    elif path.suffix == ".jsonl":
        rows = content.split(b"\n")
        number = random.randrange(len(rows) - 1)
        rows[number] = changed_json(rows[number], random)
        content = b"\n".join(rows)
    elif path.suffix == ".toml" and random.random() < 0.8:
        try:
            content = tomli_w.dumps(changed(tomllib.loads(content.decode()), random)).encode()
        except (TypeError, ValueError, AttributeError):  # TOML has no such value
            content = damaged(content, random)
    elif path.suffix == ".safetensors" and random.random() < 0.7:
        content = with_header(content, lambda header: changed_json(header, random))
    else:
        content = damaged(content, random)
    path.write_bytes(content)


def with_header(content: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return a safetensors file with another header, whose length fits it."""
    size = int.from_bytes(content[:8], "little")
    header = change(content[8 : 8 + size].rstrip())
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def sign(step: Path) -> None:
    """Write the manifest anew, as somebody would who means harm."""
    files = [path for path in step.iterdir() if path.name != "manifest.json"]
    entries = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in files
    }
    (step / "manifest.json").write_text(json.dumps(entries))


def damage_one(
    base: Path, work: Path, names: Iterable[str], use: Callable[[Path], object], trials: int
) -> int:
    """Use so many damaged copies of a folder, a model's weights signed anew; return how many were
    refused.
    """
    refused = 0
    for seed in range(trials):
        random = Random(seed)
        if work.exists():
            shutil.rmtree(work)
        shutil.copytree(base, work)
        file = random.choice([path for name in names for path in sorted(work.glob(name))])
        damage_file(file, random)
        if file.name == "model.safetensors":
            sign(file.parent)
        refused += bool(refusal(lambda: use(work), seconds=30))
    return refused
