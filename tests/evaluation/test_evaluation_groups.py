"""lm-eval's groups: one row with the group's own figure, weighted as it is defined."""

import json
import math
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import pooled_sample_stderr, unweighted_mean_stderr
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from evaluation.models import llama, save_llama
from wakeful.cli import main
from wakeful.evaluation import tasks as tasks_module
from wakeful.evaluation.examples import TaskSet
from wakeful.evaluation.harness import run_tasks
from wakeful.evaluation.tasks import named_tasks, quiet
from wakeful.scores import Score, paired_difference

__all__ = ["llama"]

QUESTIONS = {"physics": 5, "biology": 11, "music": 4, "history": 8, "cooking": 6}
DATA = """
import datasets

def rows(subject, count, **_):
    return {"test": datasets.Dataset.from_list(
        [{"context": f"{subject} {n}:", "choices": ["yes", "no"], "answer": n % 2}
         for n in range(count)]
    )}
"""
TASK = """
task: {name}
tag: subjects
custom_dataset: !function data.rows
dataset_kwargs: {{subject: {name}, count: {count}}}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
BY_SIZE = "aggregate_metric_list: [{metric: acc, weight_by_size: true}]"
EQUAL = "aggregate_metric_list: [{metric: acc, weight_by_size: false}]"
GROUPS = {
    "sciences": f"task: [physics, biology]\n{BY_SIZE}",
    "arts": f"task: [music, history]\n{EQUAL}",
    "school": f"task: [sciences, arts]\n{BY_SIZE}",
    "evenly": f"task: [sciences, arts]\n{EQUAL}",
    "loose": "task: [sciences, cooking]",
}


@pytest.fixture(autouse=True)
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have lm-eval know these tasks and groups alone."""
    folder = tmp_path / "definitions"
    folder.mkdir()
    (folder / "data.py").write_text(DATA)
    for name, count in QUESTIONS.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, count=count))
    for name, text in GROUPS.items():
        (folder / f"_{name}.yaml").write_text(f"group: {name}\n{text}\n")
    own = partial(TaskManager, include_path=str(folder), include_defaults=False)
    monkeypatch.setattr(tasks_module, "TaskManager", own)


class Guessing(LM):
    """Answers at random, the same for the same question and seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        told = [f"{self._seed} {request.args}".encode() for request in requests]
        return [(-(zlib.crc32(each) % 997) / 100, False) for each in told]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Instance]) -> list[str]:
        raise NotImplementedError


def asked(*names: str, seed: int = 0, **options: Any) -> dict[tuple[str, str], Score]:
    scores = run_tasks(f"m{seed}", Guessing(seed), named_tasks(names), **options)
    return {(score.task, score.metric): score for score in scores}


def leaves(found: dict[tuple[str, str], Score], *names: str) -> list[Score]:
    return [found[name, "acc"] for name in names]


def test_a_groups_figure_is_lm_evals_own() -> None:
    found = asked("school")
    task_set = named_tasks(["school"])
    with quiet():
        given: Any = {"tasks": task_set.tasks, "groups": task_set.groups}
        results: Any = evaluate(Guessing(0), given, bootstrap_iters=100)
    for name in ("school", "sciences", "arts"):
        assert found[name, "acc"].figure == pytest.approx(results["results"][name]["acc,none"])
    school = found["school", "acc"]
    parts = leaves(found, "physics", "biology", "music", "history")
    assert school.keys == tuple(f"{part.task}/{key}" for part in parts for key in part.keys)
    assert school.weights == pytest.approx(np.ones(28))
    right = sum(part.values.sum() for part in parts)
    assert school.figure == pytest.approx(right / 28)
    # Questions scatter around their own task's mean, as in lm-eval's pooled error.
    errors, sizes = [part.error for part in parts], [len(part.keys) for part in parts]
    expected = math.sqrt(sum((n / 28 * e) ** 2 for n, e in zip(sizes, errors, strict=True)))
    assert school.error == pytest.approx(expected)
    assert school.error == pytest.approx(pooled_sample_stderr(errors, sizes), rel=0.05)


def test_tasks_have_equal_weight_where_the_group_says_so() -> None:
    arts = asked("arts")["arts", "acc"]
    parts = leaves(asked("arts"), "music", "history")
    assert arts.figure == pytest.approx((parts[0].figure + parts[1].figure) / 2)
    assert arts.error == pytest.approx(unweighted_mean_stderr([part.error for part in parts]))
    # A group in a group: lm-eval weights the tasks, not the groups.
    evenly = asked("evenly")
    four = leaves(evenly, "physics", "biology", "music", "history")
    assert evenly["evenly", "acc"].figure == pytest.approx(sum(part.figure for part in four) / 4)


@pytest.mark.parametrize("group", ["school", "evenly"])
def test_groups_of_two_models_are_paired_by_question(group: str) -> None:
    names = ("physics", "biology", "music", "history")
    ours, theirs = (asked(group, seed=seed) for seed in (0, 1))
    gap = paired_difference(theirs[group, "acc"], ours[group, "acc"])
    assert gap is not None
    apart = theirs[group, "acc"].figure - ours[group, "acc"].figure
    assert gap[0] == pytest.approx(apart)
    pairs = zip(leaves(theirs, *names), leaves(ours, *names), strict=True)
    errors = [paired[1] for one, other in pairs if (paired := paired_difference(one, other))]
    sizes = np.array([QUESTIONS[name] for name in names], dtype=np.float64)
    shares = sizes / sizes.sum() if group == "school" else np.full(4, 1 / 4)
    assert gap[1] == pytest.approx(math.sqrt(np.sum((shares * errors) ** 2)))
    assert paired_difference(ours[group, "acc"], ours[group, "acc"]) == (0.0, 0.0)


def shown(found: dict[tuple[str, str], Score]) -> list[str]:
    return [task for (task, _), score in found.items() if not score.part_of]


def test_a_group_stands_for_its_parts() -> None:
    found = asked("cooking", "school")
    assert list(dict.fromkeys(shown(found))) == ["school", "cooking"]
    inside = {task for (task, _), score in found.items() if score.part_of == "school"}
    assert inside == {"sciences", "arts", "physics", "biology", "music", "history"}
    assert found["physics", "acc_norm"].part_of == "school"


def test_a_part_that_is_named_too_is_shown() -> None:
    found = asked("school", "arts", "music", "cooking")
    assert {*shown(found)} == {"school", "arts", "music", "cooking"}
    assert found["history", "acc"].part_of == "school"


def test_a_group_that_aggregates_nothing_leaves_its_parts_as_they_are() -> None:
    found = asked("loose")
    assert {*shown(found)} == {"sciences", "cooking"}
    assert found["sciences", "acc"].part_of == ""
    assert found["physics", "acc"].part_of == "sciences"


def test_a_tag_is_all_of_its_tasks() -> None:
    assert {*shown(asked("subjects"))} == {*QUESTIONS}
    assert {*QUESTIONS} < {*shown(asked("subjects", "school"))}


def test_shots_and_limits_are_those_of_the_tasks() -> None:
    few = asked("school@1", limit=3)
    assert few["school", "acc"].title == "school, 1 shot: acc"
    assert len(few["school", "acc"].keys) == 12
    mixed = named_tasks(["school@1"])
    mixed.tasks["music"].set_config(key="num_fewshot", value=0)
    (school, *_) = run_tasks("m", Guessing(0), mixed)
    assert school.shots is None
    assert school.title == "school: acc"


def test_what_leaves_no_error_has_none() -> None:
    one = asked("school", limit=1)["school", "acc"]
    assert one.keys == ("all",)
    assert math.isnan(one.error)
    tasks = named_tasks(["school"])
    tasks.tasks["music"]._aggregation_list["acc"] = max  # a median, a BLEU: no mean over examples
    scores = run_tasks("m", Guessing(0), tasks)
    found = {score.task: score for score in scores if score.metric == "acc"}
    assert found["school"].keys == found["arts"].keys == ("all",)
    assert found["arts"].figure == pytest.approx((1.0 + found["history"].figure) / 2)
    assert len(found["sciences"].keys) == 16


def test_tasks_without_groups_are_as_they_were() -> None:
    assert TaskSet() == TaskSet({}, {}, frozenset())
    found = asked("physics", "music")
    assert not any(score.part_of for score in found.values())


@pytest.mark.slow
def test_the_page_has_the_groups_row_and_the_summary_its_parts(llama: Path, tmp_path: Path) -> None:
    other = save_llama(tmp_path / "other", seed=1)
    out = tmp_path / "out"
    command = ["evaluate", str(llama), str(other), "--tasks", "school@1", "cooking"]
    assert main([*command, "--out", str(out)]) == 0
    page = (out / "report.html").read_text("utf-8")
    assert "school, 1 shot: acc" in page
    assert "sciences" not in page
    assert "acc_norm" in page  # of cooking
    assert "physics" not in page
    assert "28 examples, 1 solved one before each; its parts are in summary.json" in page
    summary = json.loads((out / "summary.json").read_text())
    scores = {(s["task"], s["metric"]): s for s in summary["models"][1]["scores"]}
    assert "part_of" not in scores["school", "acc"]
    assert scores["physics", "acc"]["part_of"] == "school"
    pairs = {(d["task"], d["metric"]): d for d in summary["differences"]}
    gap = pairs["school", "acc"]
    first = {(s["task"], s["metric"]): s for s in summary["models"][0]["scores"]}
    assert gap["difference"] == pytest.approx(
        scores["school", "acc"]["value"] - first["school", "acc"]["value"]
    )
    assert pairs["physics", "acc"]["standard_error"] is not None
    table = pl.read_parquet(out / "evaluation.parquet")
    mine = table.filter(pl.col("model") == "other", pl.col("metric") == "acc")
    rows = mine.filter(pl.col("task") == "school")
    assert len(rows) == 28
    assert rows["value"].sum() / rows["weight"].sum() == pytest.approx(
        scores["school", "acc"]["value"]
    )
