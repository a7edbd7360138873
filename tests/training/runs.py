"""Tiny runs on tiny text, for the tests of training."""

from pathlib import Path

import pytest

from wakeful.config.schema import Config, config_from_table
from wakeful.config.tables import TomlTable, merge_tables

WORDS = ("def", "return", "value", "layer", "for", "in", "range", "self", "None", "x", "y", "= 1")


def write_text(folder: Path, *, documents: int = 60, words: int = 80) -> Path:
    """Write small documents whose words follow a fixed pattern; return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    state = 1
    for number in range(documents):
        chosen = []
        for _ in range(words):
            state = (1103515245 * state + 12345) % 2**31
            chosen.append(WORDS[(state >> 16) % len(WORDS)])
        (folder / f"{number:03d}.txt").write_text(" ".join(chosen) + f" {number}\n")
    return folder


def tiny(text: Path, **over: TomlTable | str) -> Config:
    """Return the configuration of a run that takes about a second."""
    base: TomlTable = {
        "model": {"num_layers": 2, "num_heads": 2, "width": 16, "mlp_width": 24, "max_length": 32},
        "data": {"source": str(text), "vocab_size": 280, "validation_fraction": 0.1},
        "optimizer": {"lr": 3e-3, "final_lr": 3e-4, "warmup_steps": 2},
        "train": {"steps": 8, "batch_size": 4, "length": 16, "eval_every": 3,
                  "checkpoint_every": 3, "device": "cpu"},
    }  # fmt: skip
    return config_from_table(merge_tables(base, over))


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder of text and keep the cache inside the test's own folder."""
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    return write_text(tmp_path / "text")
