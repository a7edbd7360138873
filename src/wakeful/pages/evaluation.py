"""Scores of models as rows to show, figures for summary.json, charts, and one offline HTML page."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl

from wakeful.config.verbs import EvaluateOptions
from wakeful.estimates import finite, reach, with_error
from wakeful.evaluation.costs import DECODED, ROUNDS
from wakeful.evaluation.scores import AVERAGE, Score, difference, ratio
from wakeful.pages.charts import Drawing, colored, colors, shaped, tip, tips, unchecked
from wakeful.pages.page import Step, listed, write_page
from wakeful.runs.run import Environment

_TERM = re.compile("[^a-z]+")


@dataclass(frozen=True)
class Cell:
    """A model's figure with its error and, past the first model, its paired difference."""

    value: str
    difference: str = ""


@dataclass(frozen=True)
class Row:
    """One metric of one task, a cell for each model."""

    title: str
    better: str
    cells: list[Cell]


def shown(scores: Sequence[Score]) -> tuple[list[str], list[Row]]:
    """Return the models and, for each task and metric, what to show of each model.

    A group that aggregates its parts stands for them.
    """
    names = list(dict.fromkeys(score.model for score in scores))
    rows: list[Row] = []
    for title, found in _measures(scores).items():
        higher = any(score.higher_is_better for score in found.values())
        cells = [_cell(found.get(name), found.get(names[0])) for name in names]
        rows.append(Row(title, f"{'higher' if higher else 'lower'} is better", cells))
    return names, rows


def _cell(score: Score | None, first: Score | None) -> Cell:
    if score is None:
        return Cell("–")
    value = with_error(score.figure, score.error)
    if score.is_cost:
        if first is None or score is first:
            return Cell(value)
        other = ", two implementations" if score.implementation != first.implementation else ""
        return Cell(value, f"×{_times(score, first, 3)}{other}")
    paired = difference(score, first) if first and score is not first else None
    return Cell(value, with_error(*paired, "+") if paired else "")


def _times(score: Score, first: Score, digits: int) -> str:
    """Return a cost as a ratio to the first model's; one with rounds has their error."""
    times, error = ratio(score, first)
    return f"{times:.{digits}f}" if math.isnan(error) else with_error(times, error)


def score_charts(scores: Sequence[Score]) -> list[tuple[str, Drawing]]:
    """Return a chart for each task and metric: every model's figure ± one standard error."""
    names, rows = shown(scores)
    charts: list[tuple[str, Drawing]] = []
    for row, found in zip(rows, _measures(scores).values(), strict=True):
        drawn = [
            {"model": s.model, "figure": s.figure, "low": s.figure - e, "high": s.figure + e}
            for s in found.values()
            for e in (finite(s.error) or 0.0,)
            if math.isfinite(s.figure)
        ]
        if drawn:
            charts.append((f"{row.title}, {row.better}", _dots(pl.DataFrame(drawn), names)))
    return charts


def _measures(scores: Sequence[Score]) -> dict[str, dict[str, Score]]:
    """Return the models' scores of each measure that is shown, by its title."""
    found: dict[str, dict[str, Score]] = {}
    for score in _visible(scores):
        found.setdefault(score.title, {})[score.model] = score
    return found


def _visible(scores: Sequence[Score]) -> list[Score]:
    return [score for score in scores if not score.hidden]


def _dots(frame: pl.DataFrame, names: Sequence[str]) -> Drawing:
    x = alt.X("figure:Q", title=None, scale=alt.Scale(zero=False, nice=True, padding=12),
              axis=alt.Axis(tickCount=5, format=".4~g", labelOverlap=True))  # fmt: skip
    base = alt.Chart(frame).encode(
        y=alt.Y("model:N", title=None, sort=list(names)),
        color=colored("model", names, legend=None),
    )
    points = base.mark_point(filled=True, size=80, opacity=1)
    points = points.encode(
        x=x,
        shape=shaped("model", names, legend=None),
        tooltip=[*tips("model:N"), tip("figure", ",.6~g")],
    )
    rules = base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q"), x2=alt.X2("high:Q"))
    return alt.layer(rules, points).properties(height=34 * len(frame), width="container")


def headlines(scores: Sequence[Score]) -> list[str]:
    """Return what the models reach, and which are surely better or worse than the first."""
    scores = _visible(scores)
    names, rows = shown(scores)
    if len(names) == 1:
        told = [f"{row.title} {row.cells[0].value}" for row in rows]
        return [f"{names[0]} reaches {listed(told)}."]
    first = {(score.task, score.metric): score for score in scores if score.model == names[0]}
    sentences = []
    for name in names[1:]:
        sides: dict[str, list[str]] = {}
        for score in scores:
            other = first.get((score.task, score.metric))
            paired = difference(score, other) if score.model == name and other else None
            if paired is None or score.is_cost:
                continue
            gap, error = paired
            if not abs(gap) > reach(error, len(score.keys)):
                side = "not significantly different in"
            else:
                side = "better in" if (gap > 0) == score.higher_is_better else "worse in"
            sides.setdefault(side, []).append(score.title)
        told = [f"{side} {listed(measures)}" for side, measures in sides.items()]
        if not all(score.is_cost for score in scores):
            told = told or ["not measured on the same examples"]
            sentences.append(f"Against {names[0]}, {name} is {'; '.join(told)}.")
        ratios = [
            f"{score.metric.rpartition(', ')[0]} "
            f"{_times(score, first[score.task, score.metric], 2)}"
            for score in scores
            if score.model == name and score.is_cost and (score.task, score.metric) in first
        ]
        if ratios:
            sentences.append(f"As ratios to {names[0]}, {name} has {listed(ratios)}.")
        codes = {
            one: next((s.implementation for s in scores if s.model == one and s.implementation), "")
            for one in (names[0], name)
        }
        if len({*codes.values()}) > 1:
            told = " and ".join(f"{one} in {code}" for one, code in codes.items())
            sentences.append(f"Cache and speed compare two implementations: {told}.")
    return sentences


@unchecked
def write_evaluation(
    scores: Sequence[Score],
    path: str | Path,
    *,
    title: str,
    method: Mapping[str, Any],
    sources: Sequence[str] = (),
) -> Path:
    """Write the page; an old page stays until the new one is whole.

    `sources` are what the models were asked for as, for a command to type.
    """
    names, rows = shown(scores)
    measured = dict.fromkeys(score.metric for score in _visible(scores))
    models = " ".join(map(shlex.quote, sources or names))
    return write_page(
        path,
        "evaluation",
        title=title,
        headlines=headlines(scores),
        steps=[Step("see where attention and channels are wasted", f"wakeful diagnose {models}")],
        names=names,
        rows=rows,
        colors=colors(names),
        charts=score_charts(scores),
        paired=any(cell.difference for row in rows for cell in row.cells),
        terms=[(metric, _TERM.sub("_", metric)) for metric in measured],
        method=method,
    )


def summary(
    names: Mapping[str, str], scores: Sequence[Score], method: Mapping[str, str]
) -> dict[str, Any]:
    """Return every model's scores, paired differences to the first model's, ratios of costs."""
    first = next(iter(names))
    baseline = {(s.task, s.metric): s for s in scores if s.model == first}
    pairs = [
        (score, difference(score, other))
        for score in scores
        if (other := baseline.get((score.task, score.metric))) and other is not score
    ]
    return {
        "models": [
            {
                "model": name,
                "architecture": kind,
                "scores": [
                    {"task": s.task, "metric": s.metric, "value": finite(s.figure),
                     "standard_error": finite(s.error), "examples": len(s.keys), "shots": s.shots,
                     "higher_is_better": s.higher_is_better}
                    | ({"part_of": s.part_of} if s.part_of else {})
                    | ({"implementation": s.implementation} if s.implementation else {})
                    for s in scores if s.model == name
                ],
            }
            for name, kind in names.items()
        ],
        "differences": [
            {"model": score.model, "baseline": first, "task": score.task, "metric": score.metric,
             "difference": finite(paired[0]), "standard_error": finite(paired[1])}
            for score, paired in pairs if paired is not None
        ],
        "ratios": [
            {"model": score.model, "baseline": first, "metric": score.metric,
             "ratio": finite(times), "standard_error": finite(error)}
            for score, _ in pairs if score.is_cost
            for times, error in [ratio(score, baseline[score.task, score.metric])]
        ],
        "method": dict(method),
    }  # fmt: skip


def method_of(
    names: Mapping[str, str],
    scores: Sequence[Score],
    options: EvaluateOptions,
    machine: Environment,
    *,
    bos: str,
    dtype: str,
    text: str,
    windows: str,
    timed: str = "",
) -> dict[str, str]:
    """Return what a reader needs to judge and repeat the figures.

    `timed` says what ran each model for its speed.
    """
    method = {
        "Models": ", ".join(f"{name} ({kind})" for name, kind in names.items()),
        "BOS": bos,
        "Arithmetic": f"model in {dtype}, log-likelihoods in float32 or better",
    }
    texts = options.sources
    if texts:
        several = len(texts) > 1
        counts = "; ".join(
            f"{score.model} {len(score.keys)} windows{f' of {score.task}' if several else ''}, "
            f"{score.weights.sum():,.0f} tokens counted"
            for score in scores
            if score.task in texts and score.metric == "perplexity"
        )
        part = f"at most {options.windows} windows" if options.windows else "all of it"
        method["Texts" if several else "Text"] = (
            f"{text}, {part}, windows of {windows}, each token (but the first where "
            f"there is no BOS) counted once: {counts}"
        )
    own = {*texts, "size", "speed"}
    for task in dict.fromkeys(score.task for score in _visible(scores) if score.task not in own):
        if task.startswith(AVERAGE):
            method["Average"] = "tasks have equal weight; a group counts once, without its parts"
            continue
        asked = [score for score in scores if score.task == task]
        own_files = {"lambada": options.lambada, "choices": options.choices}
        source = own_files.get(task) or "lm-eval's own definition"
        method[f"Task {task}"] = _task_words(source, asked)
    if options.asks:
        method["lm-eval"] = metadata.version("lm-eval")
    if options.speed:
        method["Speed"] = (
            f"one sequence, after one round unmeasured {ROUNDS} rounds of all lengths in turn, one "
            f"model after the other; prefill until the first token is known, then {DECODED} greedy "
            "tokens with the cache; errors over rounds"
        )
        method["Implementation timed"] = timed
    method["Errors"] = (
        "one standard error over windows or examples; differences are paired where both models "
        "had the same ones"
    )
    method["Machine"] = str(machine)
    return method


def _task_words(source: str, asked: Sequence[Score]) -> str:
    """Return what a page says of a task or group, from its scores."""
    one = max(asked, key=lambda score: len(score.keys))
    words = [source, one.made_of] if one.made_of else [source]
    if one.keys != ("all",):
        words.append(f"{len(one.keys):,} examples")
    if one.shots is None:
        words.append("solved ones before each, as many as its task shows")
    elif one.shots:
        words.append(f"{one.shots} solved one{'s' * (one.shots > 1)} before each")
    else:
        words.append("none shown before")
    told = ", ".join(words)
    return f"{told}; its parts are in summary.json and evaluation.parquet" if one.made_of else told
