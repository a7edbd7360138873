"""Report of an evaluation, and its figures for summary.json."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Any

import altair as alt
import polars as pl

from wakeful.config.reading import DECODED_TOKENS
from wakeful.estimates import (
    INTERVAL,
    confidence_interval,
    finite_or_none,
    format_estimate,
    format_interval,
    format_perplexity,
    interval_half_width,
)  # fmt: skip
from wakeful.evaluation.costs import ROUNDS
from wakeful.evaluation.options import EvaluateOptions
from wakeful.reports.charts import Drawing, draw_intervals, encode_colors, encode_names, shapes, tip
from wakeful.reports.value import (
    Cell,
    Chart,
    NextStep,
    Report,
    Section,
    SideBySide,
    Table,
    Text,
    listed,
    method_section,
    terms,
)
from wakeful.runs.run import Environment
from wakeful.scores import AVERAGE, Score, paired_difference, score_ratio

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
    """Return the report of models' scores.

    `sources` are the names by which models were loaded and `reading` the flags by which the text
    was read: the suggested command repeats them.
    """
    names = list(dict.fromkeys(score.model for score in scores))
    measures = _group_by_measure(scores)
    rows = [
        [Cell(title, under=[_better(by_model)]),
         *(_score_cell(by_model.get(name), by_model.get(names[0])) for name in names)]
        for title, by_model in measures.items()
    ]  # fmt: skip
    paired = any(cell.under for row in rows for cell in row[1:])
    table = Table(["measure", *names], rows, "Figures", colored=True)
    below = sharper = ""
    if paired:
        below = (
            f" Below each figure, its difference to that of {names[0]} on the same examples, with "
            "the interval of the paired difference; of perplexities it is that of the losses, in "
            "nats per token."
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
        titles = {f"{title}, {_better(by_model)}": by_model for title, by_model in measures.items()}
        charts = [
            Chart(heading, partial(_draw_intervals, by_model, names), heading)
            for heading, by_model in titles.items()
        ]
        note = Text(f"Bars are 95% confidence intervals of each model alone.{sharper}", "note")
        sections.append(Section("Side by side", [note, SideBySide(charts)]))
    command = " ".join(filter(None, ["wakeful diagnose", shlex.join(sources or names), reading]))
    step = NextStep("see where attention and channels are wasted", command)
    return Report(title, score_headlines(scores), [step], [*sections, method_section(method or {})])


Found = Mapping[str, Score]
"""A measure's score of each model, by name."""


def _better(by_model: Found) -> str:
    higher = any(score.higher_is_better for score in by_model.values())
    return f"{'higher' if higher else 'lower'} is better"


def _with_interval(score: Score) -> str:
    """Format a score: a cost with its standard error over rounds of timing, any other score with
    its 95% interval over examples.
    """
    if score.is_cost:
        return format_estimate(score.figure, score.error)
    if score.exponential:
        return format_perplexity(*score.in_nats.over_examples.estimate, len(score.keys))
    return format_interval(score.figure, score.error, len(score.keys))


def _score_cell(score: Score | None, first: Score | None) -> Cell:
    """Return a score and, below it, its difference from the first model's, or their ratio."""
    if score is None:
        return Cell("–")
    value = _with_interval(score)
    if first is None or score is first:
        return Cell(value)
    if score.is_cost:
        differ = score.implementation != first.implementation
        return Cell(value, under=[f"×{_times(score, first, 3)}{', two implementations' * differ}"])
    paired = paired_difference(score, first)
    if paired is None:
        return Cell(value)
    unit = " nats" if score.exponential else ""
    return Cell(value, under=[format_interval(*paired, len(score.keys), "+") + unit])


def _times(score: Score, first: Score, digits: int) -> str:
    """Return a cost as a ratio to the first model's; one with rounds has their error."""
    times, error = score_ratio(score, first)
    return f"{times:.{digits}f}" if math.isnan(error) else format_estimate(times, error)


def _group_by_measure(scores: Sequence[Score]) -> dict[str, dict[str, Score]]:
    """Return the scores that are shown by title of the measure, then by model."""
    measures: dict[str, dict[str, Score]] = {}
    for score in _visible(scores):
        measures.setdefault(score.title, {})[score.model] = score
    return measures


def _visible(scores: Sequence[Score]) -> list[Score]:
    return [score for score in scores if not score.part_of]


def _draw_intervals(by_model: Found, names: Sequence[str]) -> Drawing | None:
    """Draw every model's figure and its 95% confidence interval."""
    points = [
        {
            "model": s.model,
            "figure": s.figure,
            "low": finite_or_none(low),
            "high": finite_or_none(high),
        }
        for s in by_model.values()
        for low, high in (s.interval,)
        if math.isfinite(s.figure)
    ]
    if not points:
        return None
    ends = {"low": pl.Float64, "high": pl.Float64}
    frame = pl.DataFrame(points, schema_overrides=ends)
    x = alt.X("figure:Q", title=None, scale=alt.Scale(zero=False, nice=True, padding=12),
              axis=alt.Axis(tickCount=5, format=".4~g", labelOverlap=True))  # fmt: skip
    return draw_intervals(
        frame, "model", x, encode_colors("model", names, legend=None), order=names,
        shape=encode_names(alt.Shape, "model", names, shapes(names), legend=None),
        tooltip=[tip("figure", ",.6~g")],
    )  # fmt: skip


def score_headlines(scores: Sequence[Score]) -> list[str]:
    """Return a sentence for each model: where it is better or worse than the first."""
    scores = _visible(scores)
    names = list(dict.fromkeys(score.model for score in scores))
    if len(names) == 1:
        reached = [
            f"{title} {_with_interval(score)}"
            for title, by_model in _group_by_measure(scores).items() for score in by_model.values()
        ]  # fmt: skip
        return [f"{names[0]} reaches {listed(reached)}."]
    first = {(score.task, score.metric): score for score in scores if score.model == names[0]}
    sentences = []
    for name in names[1:]:
        titles_by_verdict: dict[str, list[str]] = {}
        ratios: list[str] = []
        for score in scores:
            baseline = first.get((score.task, score.metric))
            if score.model != name or baseline is None:
                continue
            if score.is_cost:
                cost = score.metric.rpartition(", ")[0]
                ratios.append(f"{cost} {_times(score, baseline, 2)}")
            elif side := _compare_with_baseline(score, baseline, scores):
                titles_by_verdict.setdefault(side, []).append(score.title)
        clauses = [f"{side} {listed(measures)}" for side, measures in titles_by_verdict.items()]
        if not all(score.is_cost for score in scores):
            clauses = clauses or ["not measured on the same examples"]
            sentences.append(f"Against {names[0]}, {name} is {'; '.join(clauses)}.")
        if ratios:
            sentences.append(f"As ratios to {names[0]}, {name} has {listed(ratios)}.")
        codes = {
            model: next(
                (s.implementation for s in scores if s.model == model and s.implementation), ""
            )
            for model in (names[0], name)
        }
        if len({*codes.values()}) > 1:
            pair = " and ".join(f"{model} in {code}" for model, code in codes.items())
            sentences.append(f"Cache and speed compare two implementations: {pair}.")
    return sentences


def _compare_with_baseline(score: Score, baseline: Score, scores: Sequence[Score]) -> str:
    """Return "better in", "worse in" or "not significantly different in" for a score.

    The interval of the paired difference from the baseline decides; without pairs the text is "".
    Perplexity and bits per byte are compared by the loss of the same model and text, which is
    searched in `scores`.
    """
    if score.metric in _OF_LOSSES:
        losses = {
            loss.model: loss for loss in scores if loss.task == score.task and loss.exponential
        }
        score, baseline = losses.get(score.model, score), losses.get(baseline.model, baseline)
    paired = paired_difference(score, baseline)
    if paired is None:
        return ""
    gap, error = paired
    if not math.isfinite(error):
        return "not judged, without a standard error, in"
    if abs(gap) <= interval_half_width(error, len(score.keys)):
        return "not significantly different in"
    return "better in" if (gap > 0) == score.higher_is_better else "worse in"


def evaluation_summary(
    names: Mapping[str, str], scores: Sequence[Score], method: Mapping[str, str]
) -> dict[str, Any]:
    """Return every model's scores, paired differences to the first model's, ratios of costs."""
    first = next(iter(names))
    baseline = {(s.task, s.metric): s for s in scores if s.model == first}
    pairs = [
        (score, reference)
        for score in scores
        if (reference := baseline.get((score.task, score.metric))) and reference is not score
    ]
    return {
        "models": [
            {
                "model": name,
                "architecture": kind,
                "scores": [
                    {"task": s.task, "metric": s.metric, "value": finite_or_none(s.figure),
                     "standard_error": finite_or_none(s.error),
                     "low": finite_or_none(s.interval[0]), "high": finite_or_none(s.interval[1]),
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
             "difference": finite_or_none(paired[0]), "standard_error": finite_or_none(paired[1]),
             "low": finite_or_none(low), "high": finite_or_none(high)}
            | ({"unit": "nats per token"} if score.exponential else {})
            for score, reference in pairs
            if not score.is_cost and (paired := paired_difference(score, reference))
            for low, high in [confidence_interval(*paired, len(score.keys))]
        ],
        "ratios": [
            {"model": score.model, "baseline": first, "metric": score.metric,
             "ratio": finite_or_none(times), "standard_error": finite_or_none(error)}
            for score, reference in pairs if score.is_cost
            for times, error in [score_ratio(score, reference)]
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
    """Return how the figures were measured, by topic, for a reader to judge and repeat them.

    `timed` names the implementation that was timed.
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
        task_scores = [score for score in scores if score.task == task]
        own_files = {"lambada": options.lambada, "choices": options.choices}
        source = own_files.get(task) or "lm-eval's own definition"
        description = _describe_task(source, task_scores)
        if any(score.part_of == task for score in scores):
            description += "; its parts are in summary.json and evaluation.parquet"
        method[f"Task {task}"] = description
    if options.asks:
        method["lm-eval"] = metadata.version("lm-eval")
    if options.speed:
        method["Speed"] = (
            f"one sequence, after one round unmeasured {ROUNDS} rounds of all lengths in turn, one "
            f"model after the other; prefill until the first token is known, then {DECODED_TOKENS} "
            "greedy tokens with the cache; errors over rounds"
        )
        method["Implementation timed"] = timed
    method["Intervals"] = (
        f"{INTERVAL} over windows or examples; differences are paired where both models had the "
        "same ones, and those of perplexities are of the losses in nats"
    )
    method["Machine"] = str(machine)
    return method


def _describe_task(source: str, task_scores: Sequence[Score]) -> str:
    """Return a task's source, number of examples and few-shot setting, as text."""
    largest = max(task_scores, key=lambda score: len(score.keys))
    parts = [source]
    if largest.keys != ("all",):
        parts.append(f"{len(largest.keys):,} examples")
    if largest.shots is None:
        parts.append("solved ones before each, as many as its task shows")
    elif largest.shots:
        parts.append(f"{largest.shots} solved one{'s' * (largest.shots > 1)} before each")
    else:
        parts.append("none shown before")
    return ", ".join(parts)
