"""The demonstration's page: what its sentences follow from."""

import json
from pathlib import Path

import pytest

from pages.test_report import make_comparison
from wakeful.data.tasks import task_of
from wakeful.demonstration.report import Story
from wakeful.runs.run import Run
from wakeful.training.compared import read_comparison

TASK = task_of("backcopy")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a comparison whose first variant falls ill, as its logs say."""
    return make_sick(tmp_path / "c")


def make_sick(place: Path) -> Path:
    """Write that comparison."""
    path = make_comparison(place, {"ill": 0.0, "well": -0.5}, [0])
    for variant, masses in (("ill", (0.02, 0.61)), ("well", (0.01, 0.04))):
        run = Run(path / variant / "seed-0")
        for step, mass in zip((0, 20), masses, strict=True):
            row = {"kind": "figure", "step": step, "layer": 0, "position": "other",
                   "metric": "bos_mass", "variant": "paper", "standard_error": 0.01}  # fmt: skip
            for head in (None, 0):
                run.append(row | {"head": head, "value": mass}, log="trajectories.jsonl")
    return path


def set_masses(folder: Path, variant: str, after: float) -> None:
    log = folder / variant / "seed-0" / "trajectories.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [row | {"value": after} if row["step"] else row for row in rows]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_sentences_follow_from_the_figures(folder: Path) -> None:
    found = read_comparison(folder)
    steps = found.runs[0].config.train.steps
    first, second, third = Story(found, found, None, "nothing").sentences
    assert first.startswith(
        f"In {steps} steps ill falls ill: where there is nothing to copy, its head gives BOS "
        "61.0% of its attention (2.0% before training); well stays well, with 4.0%; well ends 0.5"
    )
    assert first.endswith("nats below ill.")
    assert second.startswith("well ends 0.5")
    assert third == "nothing"

    set_masses(folder, "ill", 0.04)
    set_masses(folder, "well", 0.2)
    found = read_comparison(folder)
    first = Story(found, found, None).sentences[0]
    assert "ill stays well: where" in first
    assert "well sickens a little, with 20.0%" in first
