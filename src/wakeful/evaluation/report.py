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
from wakeful.scores import Score, paired_difference, score_ratio

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
    """Return the report of models' scores: figures, charts if there are several models, and the
    next command to run.

    `method` says how it was measured, by topic. `sources` are the names by which models were
    loaded, and `reading` the flags by which the text was read: the suggested command repeats them.
    """
    names = list(dict.fromkeys(score.model for score in scores))
    measures = _group_by_measure(scores)
    rows = [
        [Cell(measure, under=[_describe_direction(by_model)]),
         *(_score_cell(by_model.get(name), by_model.get(names[0])) for name in names)]
        for measure, by_model in measures.items()
    ]  # fmt: skip
    has_differences = any(cell.under for row in rows for cell in row[1:])  # without the titles
    table = Table(["measure", *names], rows, "Figures", colored=True)
    difference_note = pairing_note = ""
    if has_differences:
        difference_note = (
            f" Below each figure, its difference to that of {names[0]} on the same examples, with "
            "the interval of the paired difference; of perplexities it is that of the losses, in "
            "nats per token."
        )
        pairing_note = " Paired differences are sharper: two bars that overlap can still differ."
    metrics = dict.fromkeys(score.metric for score in _visible(scores))
    sections = [
        Section("Figures", [
            table, Text(f"± is the {INTERVAL}, and so is what stands in parentheses; of a speed, "
                        f"one standard error over rounds.{difference_note}", "note"),
            terms((metric, _TERM.sub("_", metric)) for metric in metrics),  # key: bits_per_byte
        ], brief=True),
    ]  # fmt: skip
    if len(names) > 1:
        charts: list[Chart] = []
        for measure, by_model in measures.items():
            heading = f"{measure}, {_describe_direction(by_model)}"
            charts.append(Chart(heading, partial(_draw_intervals, by_model, names), heading))
        note = Text(f"Bars are 95% confidence intervals of each model alone.{pairing_note}", "note")
        sections.append(Section("Side by side", [note, SideBySide(charts)]))
    command = " ".join(filter(None, ["wakeful diagnose", shlex.join(sources or names), reading]))
    step = NextStep("see where attention and channels are wasted", command)
    return Report(title, score_headlines(scores), [step], [*sections, method_section(method or {})])


ScoreByModel = Mapping[str, Score]
"""A measure's score of each model, by the model's name."""


def _describe_direction(by_model: ScoreByModel) -> str:
    """Return "higher is better" or "lower is better" for a measure."""
    higher = any(score.higher_is_better for score in by_model.values())
    return f"{'higher' if higher else 'lower'} is better"


def _format_score(score: Score) -> str:
    """Format a score: a cost with its standard error over rounds of timing, any other score with
    its 95% interval over examples.
    """
    if score.is_cost:
        return format_estimate(score.figure, score.error)
    if score.exponential:
        return format_perplexity(*score.in_nats.over_examples.estimate, len(score.keys))
    return format_interval(score.figure, score.error, len(score.keys))


def _score_cell(score: Score | None, first: Score | None) -> Cell:
    """Return the table's cell for a score: its figure and, below it, the paired difference from the
    score of the first model. Below a cost is the ratio of the two instead.

    `score` is None for a model without this score: the cell is a dash. Nothing is below the first
    model's own score, or one on other examples.
    """
    if score is None:
        return Cell("–")
    value = _format_score(score)
    if first is None or score is first:
        return Cell(value)
    if score.is_cost:
        ratio = f"×{_format_ratio(score, first, 3)}"
        if score.implementation != first.implementation:
            ratio += ", two implementations"
        return Cell(value, under=[ratio])
    paired = paired_difference(score, first)
    if paired is None:  # measured on other examples
        return Cell(value)
    difference, error = paired
    unit = " nats" if score.exponential else ""  # perplexities differ by their losses
    return Cell(value, under=[format_interval(difference, error, len(score.keys), "+") + unit])


def _format_ratio(score: Score, first: Score, digits: int) -> str:
    """Format the ratio of a cost to that of the first model: with its standard error if both were
    measured in several rounds, else with `digits` decimals.
    """
    ratio, error = score_ratio(score, first)
    has_no_error = math.isnan(error)  # such as a size, which is measured once
    return f"{ratio:.{digits}f}" if has_no_error else format_estimate(ratio, error)


def _group_by_measure(scores: Sequence[Score]) -> dict[str, dict[str, Score]]:
    """Return the scores that the report shows, as {title of the measure: {model: score}}."""
    measures: dict[str, dict[str, Score]] = {}
    for score in _visible(scores):
        measures.setdefault(score.title, {})[score.model] = score
    return measures


def _visible(scores: Sequence[Score]) -> list[Score]:
    return [score for score in scores if not score.part_of]


def _draw_intervals(by_model: ScoreByModel, names: Sequence[str]) -> Drawing | None:
    """Draw the figure of every model and its 95% confidence interval; return None if no figure is
    finite.

    `names` are all models of the report: each has the same color and shape in every chart.
    """
    points: list[dict[str, Any]] = []
    for score in by_model.values():
        if math.isfinite(score.figure):
            low, high = map(finite_or_none, score.interval)
            points.append({"model": score.model, "figure": score.figure, "low": low, "high": high})
    if not points:
        return None
    # If all ends are None, polars cannot infer their type.
    frame = pl.DataFrame(points, schema_overrides={"low": pl.Float64, "high": pl.Float64})
    x = alt.X("figure:Q", title=None, scale=alt.Scale(zero=False, nice=True, padding=12),
              axis=alt.Axis(tickCount=5, format=".4~g", labelOverlap=True))  # fmt: skip
    return draw_intervals(
        frame, "model", x, encode_colors("model", names, legend=None), order=names,
        shape=encode_names(alt.Shape, "model", names, shapes(names), legend=None),
        tooltip=[tip("figure", ",.6~g")],
    )  # fmt: skip


def score_headlines(scores: Sequence[Score]) -> list[str]:
    """Return sentences that compare each model with the first: where it is better or worse, and its
    costs as ratios. For a single model, return one sentence that lists its figures.
    """
    scores = _visible(scores)
    names = list(dict.fromkeys(score.model for score in scores))
    if len(names) == 1:
        figures = [
            f"{title} {_format_score(score)}"
            for title, by_model in _group_by_measure(scores).items() for score in by_model.values()
        ]  # fmt: skip
        return [f"{names[0]} reaches {listed(figures)}."]
    return [sentence for name in names[1:] for sentence in _compare_models(name, names[0], scores)]


def _compare_models(name: str, first_name: str, scores: Sequence[Score]) -> list[str]:
    """Return sentences that compare the model `name` with the first one: its verdicts by measure,
    the ratios of its costs, and a warning if two implementations were timed.
    """
    first_scores = {
        (score.task, score.metric): score for score in scores if score.model == first_name
    }
    titles_by_verdict: dict[str, list[str]] = {}
    ratios: list[str] = []
    for score in scores:
        baseline = first_scores.get((score.task, score.metric))
        if score.model != name or baseline is None:
            continue
        if score.is_cost:
            metric_without_unit = score.metric.rpartition(", ")[0]
            ratios.append(f"{metric_without_unit} {_format_ratio(score, baseline, 2)}")
            continue
        verdict = _compare_with_baseline(score, baseline, scores)
        if verdict:
            titles_by_verdict.setdefault(verdict, []).append(score.title)
    sentences: list[str] = []
    if not all(score.is_cost for score in scores):  # with costs alone there are no verdicts
        clauses = [f"{verdict} {listed(titles)}" for verdict, titles in titles_by_verdict.items()]
        clauses = clauses or ["not measured on the same examples"]
        sentences.append(f"Against {first_name}, {name} is {'; '.join(clauses)}.")
    if ratios:
        sentences.append(f"As ratios to {first_name}, {name} has {listed(ratios)}.")
    first_code, code = _implementation(first_name, scores), _implementation(name, scores)
    if first_code != code:
        sentences.append(
            "Cache and speed compare two implementations: "
            f"{first_name} in {first_code} and {name} in {code}."
        )
    return sentences


def _implementation(model: str, scores: Sequence[Score]) -> str:
    """Return the code that a model's speed was measured with; "" if it was not measured."""
    return next(
        (score.implementation for score in scores if score.model == model and score.implementation),
        "",
    )


def _compare_with_baseline(score: Score, baseline: Score, scores: Sequence[Score]) -> str:
    """Return "better in", "worse in" or the like for a score, by the 95% interval of its paired
    difference from the baseline; "" if the two are of different examples.

    Bits per byte and a loss over the task's own are perplexities in another unit: here the
    perplexities of the two models on the same text, from `scores`, are compared in their place.
    """
    if score.metric in _OF_LOSSES:
        perplexities = {
            other.model: other for other in scores if other.task == score.task and other.exponential
        }
        score = perplexities.get(score.model, score)
        baseline = perplexities.get(baseline.model, baseline)
    paired = paired_difference(score, baseline)
    if paired is None:
        return ""
    difference, error = paired
    if not math.isfinite(error):
        return "not judged, without a standard error, in"
    if abs(difference) <= interval_half_width(error, len(score.keys)):
        return "not significantly different in"
    is_higher = difference > 0
    return "better in" if is_higher == score.higher_is_better else "worse in"


def evaluation_summary(
    names: Mapping[str, str], scores: Sequence[Score], method: Mapping[str, str]
) -> dict[str, Any]:
    """Return the entries of summary.json: every model's scores, their paired differences from those
    of the first model, and for costs the ratios instead. A number that is not finite is None.

    `names` holds each model's architecture, by the model's name.
    """
    first = next(iter(names))
    baselines = {(score.task, score.metric): score for score in scores if score.model == first}
    differences: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    for score in scores:
        baseline = baselines.get((score.task, score.metric))
        if baseline is None or baseline is score:
            continue
        if score.is_cost:
            ratio, error = score_ratio(score, baseline)
            ratios.append({
                "model": score.model, "baseline": first, "metric": score.metric,
                "ratio": finite_or_none(ratio), "standard_error": finite_or_none(error),
            })  # fmt: skip
            continue
        paired = paired_difference(score, baseline)
        if paired is not None:  # None: measured on other examples
            difference, error = paired
            low, high = confidence_interval(difference, error, len(score.keys))
            unit = {"unit": "nats per token"} if score.exponential else {}
            differences.append({
                "model": score.model, "baseline": first, "task": score.task,
                "metric": score.metric, "difference": finite_or_none(difference),
                "standard_error": finite_or_none(error), "low": finite_or_none(low),
                "high": finite_or_none(high), **unit,
            })  # fmt: skip
    models = [
        {
            "model": name,
            "architecture": architecture,
            "scores": [_score_figures(score) for score in scores if score.model == name],
        }
        for name, architecture in names.items()
    ]
    return {
        "models": models, "differences": differences, "ratios": ratios, "method": dict(method),
    }  # fmt: skip


def _score_figures(score: Score) -> dict[str, Any]:
    """Return a score for summary.json, with its standard error and 95% confidence interval."""
    low, high = score.interval
    figures: dict[str, Any] = {
        "task": score.task, "metric": score.metric, "value": finite_or_none(score.figure),
        "standard_error": finite_or_none(score.error), "low": finite_or_none(low),
        "high": finite_or_none(high), "examples": len(score.keys), "shots": score.shots,
        "higher_is_better": score.higher_is_better,
    }  # fmt: skip
    if score.part_of:
        figures["part_of"] = score.part_of
    if score.implementation:
        figures["implementation"] = score.implementation
    return figures


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

    `names` holds each model's architecture, by the model's name. `text` and `windows` describe what
    was read, and `timed` names the implementation whose speed was measured.
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
    """Return a task's source, number of examples and number of solved examples (shots) before each,
    as text.
    """
    largest = max(task_scores, key=lambda score: len(score.keys))
    parts = [source]
    if largest.keys != ("all",):  # that is a figure whose examples are unknown
        parts.append(f"{len(largest.keys):,} examples")
    if largest.shots is None:  # a group of tasks with different numbers of shots
        parts.append("solved ones before each, as many as its task shows")
    elif largest.shots > 1:
        parts.append(f"{largest.shots} solved ones before each")
    elif largest.shots:
        parts.append("1 solved one before each")
    else:
        parts.append("none shown before")
    return ", ".join(parts)
