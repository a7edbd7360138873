"""The demonstration's page: what its sentences follow from, and the film of a head."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import vl_convert

from pages.test_report import make_comparison
from wakeful.config.schema import Config, config_to_toml
from wakeful.data.tasks import TaskData, task_of
from wakeful.demonstration.report import Story, draw_attention_film
from wakeful.diagnosis.heads import visible_text
from wakeful.errors import WakefulError
from wakeful.reports.charts import specification
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


def filmed(folder: Path, weights: np.ndarray, steps: int = 2, variant: str = "ill") -> Run:
    """Log a head's weights in a run of the task."""
    assert TASK is not None
    run = Run(folder / variant / "seed-0")
    run.write_text("config.toml", config_to_toml(Config(name=variant)).replace(
        'source = "python-stdlib"', 'source = "backcopy"'))  # fmt: skip
    data = TaskData(TASK)
    data.tokenizer.save(run.path)
    tokens = data.validation.read(np.arange(1), len(weights))[0].tolist()
    run.remove("attention.jsonl")
    for step in range(steps):
        for head in (0, 1):
            run.append({"kind": "attention", "step": step, "layer": 0, "head": head,
                        "tokens": tokens, "weights": (weights / (1 + step + head)).tolist()},
                       log="attention.jsonl")  # fmt: skip
    return run


def test_a_film_is_the_first_heads_frames_and_ends_with_the_last(folder: Path) -> None:
    assert TASK is not None
    weights = np.tril(np.random.default_rng(0).random((7, 7)))
    filmed(folder, weights)
    spec = specification(draw_attention_film(read_comparison(folder).of("ill")[0]))
    given = {each["name"]: each for each in spec["params"]}
    assert given["shown"]["bind"]["labels"] == ["step 0", "step 1"]
    assert given["shown"]["value"] == 1
    tokens = TaskData(TASK).validation.read(np.arange(1), 7)
    letters = ["BOS", *(visible_text(TASK.characters[each - 1]) for each in tokens[0, 1:])]
    needed = TASK.is_trigger(tokens)[0]
    assert given["labels"]["value"] == [
        f"{n} {letter}{' ◂' if here else ''}"
        for n, (letter, here) in enumerate(zip(letters, needed, strict=True))
    ]
    svg = vl_convert.vegalite_to_svg(spec)
    found = re.findall(r"query: (\d+); key: (\d+); weight: ([\d.e-]+)", svg)
    found = found or [(q, k, w) for k, q, w in
                      re.findall(r"key: (\d+); query: (\d+); weight: ([\d.e-]+)", svg)]  # fmt: skip
    assert len(found) == 7 * 8 // 2
    for query, key, weight in found:
        assert float(weight) == pytest.approx(weights[int(query), int(key)] / 2, abs=0.013)


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        (np.full((3, 3), 1.5), "outside 0 to 1"),
        (np.full((3, 3), -0.1), "outside 0 to 1"),
        (np.zeros((3, 2)), "not square"),
        (np.array([["a"]]), "attention.jsonl"),
    ],
)
def test_damaged_frames_are_told_of(folder: Path, weights: np.ndarray, what: str) -> None:
    filmed(folder, np.zeros((len(weights), len(weights))), steps=1)
    log = folder / "ill" / "seed-0" / "attention.jsonl"
    row = json.loads(log.read_text().splitlines()[0]) | {"weights": weights.tolist()}
    log.write_text(json.dumps(row) + "\n")
    with pytest.raises(WakefulError, match=what):
        draw_attention_film(read_comparison(folder).of("ill")[0])
    log.unlink()
    with pytest.raises(WakefulError, match="has no weights of the first head"):
        draw_attention_film(read_comparison(folder).of("ill")[0])
