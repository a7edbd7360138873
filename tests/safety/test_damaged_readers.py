"""Configurations, text and examples from others: read, or refused in one line, always in time."""

import io
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest
import tomli_w

from damage import changed, changed_json, damaged, refusal
from wakeful.config.schema import (
    Config,
    config_from_table,
    config_to_table,
    read_layouts,
    read_seeds,
    split_variants,
)
from wakeful.config.tables import from_table, read_table
from wakeful.data.sources import read_documents
from wakeful.errors import WakefulError
from wakeful.evaluation.examples import read_choices, read_lambada
from wakeful.inheritance.recipe import Recipe
from wakeful.runs.run import read_windows

TRIALS = [pytest.param(40, id="few"), pytest.param(4000, id="many", marks=pytest.mark.long)]
TEXTS = [{"text": f"some words {n} here"} for n in range(6)]
CHOICES = [
    {"goal": "a", "sol1": "b", "sol2": "c", "label": 1},
    {"question": "q", "choices": ["a", "b"], "answer": 0},
    {"context": "q", "choices": ["a", "b", "c"], "answer": 2},
]
COMPARISON = {
    "preset": "cpu-tiny", "seeds": [0, 1], "layouts": [],
    "variants": {"a": {"model": {"route": "own"}}, "b": {"model": {"route": "svformer"}}},
}  # fmt: skip


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def one_line_changed(content: bytes, random: Random) -> bytes:
    rows = content.split(b"\n")
    number = random.randrange(len(rows) - 1)
    rows[number] = changed_json(rows[number], random)
    return b"\n".join(rows)


def toml(table: dict[str, Any]) -> Callable[[bytes, Random], bytes]:
    def damage(content: bytes, random: Random) -> bytes:
        if random.random() < 0.3:
            return damaged(content, random)
        try:
            return tomli_w.dumps(changed(table, random)).encode()
        except (TypeError, ValueError, AttributeError):  # TOML has no such value
            return damaged(content, random)

    return damage


def parquet(**columns: list[Any]) -> bytes:
    file = io.BytesIO()
    pl.DataFrame(columns).write_parquet(file, compression="uncompressed")
    return file.getvalue()


WINDOWS = {"window": list(range(9)), "loss": [0.5] * 9, "tokens": [64] * 9}


def read_all(path: Path) -> None:
    list(read_documents(str(path)))


def read_comparison_table(path: Path) -> None:
    table = read_table(path)
    read_seeds(table)
    read_layouts(table)
    for entry in split_variants("x", table).values():
        config_from_table(entry)


CONFIG = config_to_table(Config())
RECIPE = tomllib.loads(
    'reference = "x"\nrule = "first"\nlayers = [0, 1]\n[train]\nsteps = 3\n[optimizer]\nlr = 0.1'
)
CASES: dict[str, tuple[str, bytes, Callable[[bytes, Random], bytes], Callable[[Path], object]]] = {
    "lines of text": ("a.jsonl", lines(TEXTS), one_line_changed, read_all),
    "plain text": ("a.txt", lines(TEXTS), damaged, read_all),
    "parquet text": ("a.parquet", parquet(text=["a b", "c d", "e"]), damaged, read_all),
    "windows": ("w.parquet", parquet(**WINDOWS), damaged, read_windows),
    "lambada": ("a.jsonl", lines(TEXTS), one_line_changed, read_lambada),
    "choices": ("a.jsonl", lines(CHOICES), one_line_changed, read_choices),
    "config": ("a.toml", tomli_w.dumps(CONFIG).encode(), toml(CONFIG),
               lambda path: config_from_table(read_table(path))),
    "comparison": ("a.toml", tomli_w.dumps(COMPARISON).encode(), toml(COMPARISON),
                   read_comparison_table),
    "recipe": ("a.toml", tomli_w.dumps(RECIPE).encode(), toml(RECIPE),
               lambda path: from_table(Recipe, read_table(path)).check(4)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("case", CASES)
def test_no_damage_does_more_than_be_refused(
    case: str, trials: int, tmp_path: Path, as_users_run_it: None
) -> None:
    name, content, damage, read = CASES[case]
    path = tmp_path / name
    path.write_bytes(content)
    read(path)
    refused = 0
    for seed in range(trials):
        path.write_bytes(damage(content, Random(seed)))
        refused += bool(refusal(lambda: read(path), seconds=10, megabytes=512))
    assert refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = " + b"[" * 100_000, "is not TOML"),
        (b"a" * 10_000_000, "has 10,000,000 bytes, and at most 262,144 are read"),
        (b"x." * 50_000 + b"y = 1", "more than 200 dots"),
        (b"[train]\nbatch_size = 1_000_000_000_000", "more than 268435456 tokens a step"),
        (b"[model]\nmax_length = 100_000_000_000", "does not fit into memory"),
        (b"[train]\nsteps = " + b"9" * 4000 + b"\n[data]\nmax_bytes = true", "max_bytes must be"),
    ],
)
def test_a_small_file_asks_for_no_large_amount(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    found = refusal(lambda: config_from_table(read_table(path)), seconds=10, megabytes=512)
    assert message in found


def test_parquet_that_announces_what_it_has_not_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pl.select(window=pl.repeat(0, 20_000_000, dtype=pl.Int64)).with_columns(
        loss=pl.lit(1.0), tokens=pl.lit(1)
    ).write_parquet(path)
    assert path.stat().st_size < 2**20
    with pytest.raises(WakefulError, match=r"20,000,000 rows, and at most 16,777,216 are read"):
        read_windows(path)
    # A page with a negative number of values: a reader that allocates by it ends its process.
    content = parquet(text=["a b", "c d", "e"])
    place = content.index(b"\x2c\x15\x06") + 2
    path.write_bytes(content[:place] + b"\x07" + content[place + 1 :])
    with pytest.raises(WakefulError, match=f"cannot read {path}"):
        read_all(path)
