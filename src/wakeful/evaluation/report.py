"""What is told of models' scores, and their figures for summary.json."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Any

import altair as alt
import polars as pl

from wakeful.config.reading import DECODED
from wakeful.estimates import (
    INTERVAL,
    finite,
    interval,
    reach,
    with_error,
    with_interval,
    with_perplexity,
)  # fmt: skip
from wakeful.evaluation.costs import ROUNDS
from wakeful.evaluation.options import EvaluateOptions
from wakeful.reports.charts import Drawing, colored, dots, shapes, tip, told_apart
from wakeful.reports.value import (
    Cell,
    Chart,
    Report,
    Section,
    Side,
    Step,
    Table,
    Text,
    listed,
    terms,
)
from wakeful.reports.value import method as told_method
from wakeful.runs.run import Environment
from wakeful.scores import AVERAGE, Score, difference, ratio

_OF_LOSSES = ("bits per byte", "loss over the task's own")
"""Metrics that are a perplexity's losses in another unit."""
_TERM = re.compile("[^a-z]+")


def evaluation_report(
    scores: Sequence[Score],
    *,
    title: str = "Evaluation",
    method: Mapping[str, str] | None = None,
    sources: Sequence[str] = (),
    reading: str = "",
) -> Report:
    """Return what is told of models' scores.

    `sources` are what the models were asked for as and `reading` the options by which the text was
    read, for a command to type.
    """
    names = list(dict.fromkeys(score.model for score in scores))
    found = _measures(scores)
    rows = [
        [Cell(title, under=[_better(each)]),
         *(_cell(each.get(name), each.get(names[0])) for name in names)]
        for title, each in found.items()
    ]  # fmt: skip
    paired = any(cell.under for row in rows for cell in row[1:])
    table = Table(["measure", *names], rows, "Figures", colored=True)
    below = sharper = ""
    if paired:
        below = (
            f" Below each figure, its difference to that of {names[0]} on the same examples, with "
            "the interval of the paired difference; of perplexities it is that of the losses, in "
            "nats a token."
        )
        sharper = " Paired differences are sharper: two bars that overlap can still differ."
    measured = dict.fromkeys(score.metric for score in _visible(scores))
    sections = [
        Section("Figures", [
            table, Text(f"± is the {INTERVAL}, and so is what stands in parentheses; of a speed, "
                        f"one standard error over rounds.{below}", "note"),
            terms((metric, _TERM.sub("_", metric)) for metric in measured),
        ], brief=True),
    ]  # fmt: skip
    if len(names) > 1:
        titles = {f"{title}, {_better(each)}": each for title, each in found.items()}
        charts = [Chart(it, partial(_dots, each, names), it) for it, each in titles.items()]
        note = Text(f"Bars are 95% confidence intervals of each model alone.{sharper}", "note")
        sections.append(Section("Side by side", [note, Side(charts)]))
    command = " ".join(filter(None, ["wakeful diagnose", shlex.join(sources or names), reading]))
    step = Step("see where attention and channels are wasted", command)
    return Report(title, headlines(scores), [step], [*sections, told_method(method or {})])


Found = Mapping[str, Score]
"""A measure's score of each model, by name."""


def _better(found: Found) -> str:
    higher = any(score.higher_is_better for score in found.values())
    return f"{'higher' if higher else 'lower'} is better"


def _value(score: Score) -> str:
    """Return a score with its interval; a cost has the error of its rounds."""
    if score.is_cost:
        return with_error(score.figure, score.error)
    if score.exponential:
        return with_perplexity(*score.in_nats.over_examples.estimate, len(score.keys))
    return with_interval(score.figure, score.error, len(score.keys))


def _cell(score: Score | None, first: Score | None) -> Cell:
    if score is None:
        return Cell("–")
    value = _value(score)
    if first is None or score is first:
        return Cell(value)
    if score.is_cost:
        other = ", two implementations" if score.implementation != first.implementation else ""
        return Cell(value, under=[f"×{_times(score, first, 3)}{other}"])
    paired = difference(score, first)
    if paired is None:
        return Cell(value)
    unit = " nats" if score.exponential else ""
    return Cell(value, under=[with_interval(*paired, len(score.keys), "+") + unit])


def _times(score: Score, first: Score, digits: int) -> str:
    """Return a cost as a ratio to the first model's; one with rounds has their error."""
    times, error = ratio(score, first)
    return f"{times:.{digits}f}" if math.isnan(error) else with_error(times, error)


def _measures(scores: Sequence[Score]) -> dict[str, dict[str, Score]]:
    """Return the models' scores of each measure that is shown, by its title.

    A group that aggregates its parts stands for them.
    """
    found: dict[str, dict[str, Score]] = {}
    for score in _visible(scores):
        found.setdefault(score.title, {})[score.model] = score
    return found


def _visible(scores: Sequence[Score]) -> list[Score]:
    return [score for score in scores if not score.part_of]


def _dots(found: Found, names: Sequence[str]) -> Drawing | None:
    """Draw every model's figure and its 95% confidence interval."""
    drawn = [
        {"model": s.model, "figure": s.figure, "low": finite(low), "high": finite(high)}
        for s in found.values()
        for low, high in (s.interval,)
        if math.isfinite(s.figure)
    ]
    if not drawn:
        return None
    ends = {"low": pl.Float64, "high": pl.Float64}
    frame = pl.DataFrame(drawn, schema_overrides=ends)
    x = alt.X("figure:Q", title=None, scale=alt.Scale(zero=False, nice=True, padding=12),
              axis=alt.Axis(tickCount=5, format=".4~g", labelOverlap=True))  # fmt: skip
    return dots(
        frame, "model", x, colored("model", names, legend=None), order=names,
        shape=told_apart(alt.Shape, "model", names, shapes(names), legend=None),
        tooltip=[tip("figure", ",.6~g")],
    )  # fmt: skip


def headlines(scores: Sequence[Score]) -> list[str]:
    """Return what the models reach, and which are surely better or worse than the first."""
    scores = _visible(scores)
    names = list(dict.fromkeys(score.model for score in scores))
    if len(names) == 1:
        told = [
            f"{title} {_value(one)}"
            for title, found in _measures(scores).items() for one in found.values()
        ]  # fmt: skip
        return [f"{names[0]} reaches {listed(told)}."]
    first = {(score.task, score.metric): score for score in scores if score.model == names[0]}
    sentences = []
    for name in names[1:]:
        sides: dict[str, list[str]] = {}
        ratios: list[str] = []
        for score in scores:
            other = first.get((score.task, score.metric))
            if score.model != name or other is None:
                continue
            if score.is_cost:
                cost = score.metric.rpartition(", ")[0]
                ratios.append(f"{cost} {_times(score, other, 2)}")
            elif side := _side(score, other, scores):
                sides.setdefault(side, []).append(score.title)
        told = [f"{side} {listed(measures)}" for side, measures in sides.items()]
        if not all(score.is_cost for score in scores):
            told = told or ["not measured on the same examples"]
            sentences.append(f"Against {names[0]}, {name} is {'; '.join(told)}.")
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


def _side(score: Score, other: Score, scores: Sequence[Score]) -> str:
    """Return on which side of another model's a score surely is; "" where they are not paired.

    Bits per byte are the same losses as the perplexity of their text, in another unit: both are
    judged once, by the paired difference in nats a token.
    """
    if score.metric in _OF_LOSSES:
        losses = {
            each.model: each for each in scores if each.task == score.task and each.exponential
        }
        score, other = losses.get(score.model, score), losses.get(other.model, other)
    paired = difference(score, other)
    if paired is None:
        return ""
    gap, error = paired
    if not math.isfinite(error):
        return "not judged, without a standard error, in"
    if abs(gap) <= reach(error, len(score.keys)):
        return "not significantly different in"
    return "better in" if (gap > 0) == score.higher_is_better else "worse in"


def summary(
    names: Mapping[str, str], scores: Sequence[Score], method: Mapping[str, str]
) -> dict[str, Any]:
    """Return every model's scores, paired differences to the first model's, ratios of costs."""
    first = next(iter(names))
    baseline = {(s.task, s.metric): s for s in scores if s.model == first}
    pairs = [
        (score, other)
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
                     "standard_error": finite(s.error),
                     "low": finite(s.interval[0]), "high": finite(s.interval[1]),
                     "examples": len(s.keys), "shots": s.shots,
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
             "difference": finite(paired[0]), "standard_error": finite(paired[1]),
             "low": finite(low), "high": finite(high)}
            | ({"unit": "nats a token"} if score.exponential else {})
            for score, other in pairs
            if not score.is_cost and (paired := difference(score, other))
            for low, high in [interval(*paired, len(score.keys))]
        ],
        "ratios": [
            {"model": score.model, "baseline": first, "metric": score.metric,
             "ratio": finite(times), "standard_error": finite(error)}
            for score, other in pairs if score.is_cost
            for times, error in [ratio(score, other)]
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
        words = _task_words(source, asked)
        if any(score.part_of == task for score in scores):
            words += "; its parts are in summary.json and evaluation.parquet"
        method[f"Task {task}"] = words
    if options.asks:
        method["lm-eval"] = metadata.version("lm-eval")
    if options.speed:
        method["Speed"] = (
            f"one sequence, after one round unmeasured {ROUNDS} rounds of all lengths in turn, one "
            f"model after the other; prefill until the first token is known, then {DECODED} greedy "
            "tokens with the cache; errors over rounds"
        )
        method["Implementation timed"] = timed
    method["Intervals"] = (
        f"{INTERVAL} over windows or examples; differences are paired where both models had the "
        "same ones, and those of perplexities are of the losses in nats"
    )
    method["Machine"] = str(machine)
    return method


def _task_words(source: str, asked: Sequence[Score]) -> str:
    """Return what a page says of a task or group, from its scores."""
    one = max(asked, key=lambda score: len(score.keys))
    words = [source]
    if one.keys != ("all",):
        words.append(f"{len(one.keys):,} examples")
    if one.shots is None:
        words.append("solved ones before each, as many as its task shows")
    elif one.shots:
        words.append(f"{one.shots} solved one{'s' * (one.shots > 1)} before each")
    else:
        words.append("none shown before")
    return ", ".join(words)
