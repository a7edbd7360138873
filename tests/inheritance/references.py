"""A small trained reference, for the tests of recipes and of the verb."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from training.runs import tiny, write_text
from wakeful.runs.run import Run
from wakeful.training.loop import train_run

SMALL = ["--length", "16", "--batch_size", "8", "--validation_fraction", "0.02",
         "--device", "cpu"]  # fmt: skip


def once(arguments: Iterable[str]) -> list[str]:
    """Return a command's words with the last of each option alone, in place of the earlier ones."""
    options: dict[str, list[str]] = {}
    name = ""  # of what stands before all options
    for word in arguments:
        if word.startswith("--"):
            name = word
            options[name] = []
        options.setdefault(name, []).append(word)
    return [word for words in options.values() for word in words]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Give a folder of text and a reference of four layers that was trained on it."""
    folder = tmp_path_factory.mktemp("heirs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAKEFUL_CACHE", str(folder / "cache"))
        text = write_text(folder / "text")
        config = tiny(
            text,
            model={"num_layers": 4},
            train={"steps": 40, "eval_every": 0, "checkpoint_every": 0},
        )
        return text, train_run(config, folder / "reference")


@pytest.fixture
def reference(trained: tuple[Path, Run], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Give the reference, with the cache that knows its text."""
    text, run = trained
    monkeypatch.setenv("WAKEFUL_CACHE", str(text.parent / "cache"))
    return run


@pytest.fixture
def text(trained: tuple[Path, Run]) -> Path:
    """Give the folder of its text."""
    return trained[0]
