"""Verdict of a diagnosis: the figures that papers print, lazy layers, and sentences."""

import dataclasses
import math
from typing import Any

import polars as pl

from wakeful.diagnosis.measure import ModelDiagnosis
from wakeful.estimates import finite_or_none
from wakeful.finding import Finding, Level
from wakeful.probes import exact
from wakeful.probes.base import block_outputs, mean_over_layers

_NAMED = 3
"""Later sinks that a sentence names."""


def layer_values(
    diagnosis: ModelDiagnosis, metric: str, *, variant: str = "paper", position: str = "all"
) -> pl.DataFrame:
    """Return a metric's rows of whole layers, one for each, sorted, without those of heads."""
    rows = diagnosis.rows.filter(metric=metric, variant=variant, position=position)
    return rows.filter(pl.col("head").is_null()).sort("layer")


def diagnosis_summary(diagnosis: ModelDiagnosis) -> dict[str, Any]:
    """Return a model's fields of summary.json: its name and size, figures, later sinks and advice.

    A figure is a mean over layers unless its name says otherwise; None if it is not finite.
    """

    def mean(metric: str, **where: str) -> float | None:
        return finite_or_none(mean_over_layers(layer_values(diagnosis, metric, **where)))

    ranks = head_values(diagnosis, "rank")
    drain = layer_values(diagnosis, "value_drain", position="first")
    return {
        "model": diagnosis.name,
        "architecture": diagnosis.architecture,
        "layers": diagnosis.num_layers,
        "length": diagnosis.length,
        "sequences": diagnosis.num_sequences,
        "loss": diagnosis.loss,
        "loss_standard_error": finite_or_none(diagnosis.loss_error),
        "quantized": diagnosis.quantized,
        # Attention on the first token, with row 0 (its own query, which sees no other) and without.
        **{
            name: mean(name)
            for part in ("share", "mass")
            for name in (f"first_key_{part}_with_row_0", f"first_key_{part}_without_row_0")
        },
        "stored_prefix_mass": mean("stored_prefix_mass"),
        "later_sinks": [dataclasses.asdict(sink) for sink in diagnosis.later_sinks],
        "entropy": mean("entropy", variant="code"),
        "value_drain": mean("value_drain", position="first"),
        "value_drain_lowest": finite_or_none(drain["value"].min()),  # pyright: ignore[reportArgumentType]
        "lazy_layers": lazy_layers(diagnosis),
        "heads_near_rank_1": int(layer_values(diagnosis, "near_rank_1")["value"].sum()),
        "heads": len(ranks),
        "median_head_rank": ranks["value"].median(),
        "ranks_that_are_bounds": int((ranks["kind"] == "bound").sum()),
        "advice": None if diagnosis.advice is None else dataclasses.asdict(diagnosis.advice),
        **{
            f"{metric}_{position}": mean(metric, position=position)
            for metric in ("kurtosis", "max_activation")
            for position in ("first", "rest")
        },
    }


def lazy_layers(diagnosis: ModelDiagnosis) -> list[int]:
    """Return the indices of layers in which every head's rank is at most the threshold."""
    return layer_values(diagnosis, "lazy").filter(pl.col("value") > 0)["layer"].to_list()


def findings(diagnosis: ModelDiagnosis) -> list[Finding]:
    """Return four findings, each with its level: on attention sinks, lazy layers, drained values
    and outliers.
    """
    figures, layers = diagnosis_summary(diagnosis), diagnosis.num_layers
    share, mass = (figures[f"first_key_{part}_without_row_0"] for part in ("share", "mass"))
    even = float(exact.even_shares(diagnosis.length)[0])
    # The strongest sink decides: how far its share exceeds that of even attention.
    largest_excess = max([(share or 0.0) - even, *(sink.excess for sink in diagnosis.later_sinks)])
    near, heads, lazy = figures["heads_near_rank_1"], figures["heads"], figures["lazy_layers"]
    drain = layer_values(diagnosis, "value_drain", position="first")
    drained = len(drain.filter(pl.col("value") < 0.5))
    lowest = figures["value_drain_lowest"]
    # A kurtosis that is not finite is of activations whose fourth power is not.
    kurtoses = [figures[f"kurtosis_{part}"] for part in ("first", "rest")]
    first, rest = (math.inf if kurtosis is None else kurtosis for kurtosis in kurtoses)
    bounds = figures["ranks_that_are_bounds"]
    prefix_mass = figures["stored_prefix_mass"]
    stored = "" if prefix_mass is None else f" The stored prefix receives {prefix_mass:.1%}."
    laziness = "No layer is lazy as a whole"
    if lazy:
        laziness = f"{len(lazy)} of {layers} layers are lazy ({', '.join(map(str, lazy))})"
    return [
        Finding(
            "Attention sinks",
            _level(largest_excess, 0.05, 0.3),
            f"The first token is the most attended key in {share:.1%} of (query, head) pairs and "
            f"receives {mass:.1%} of all attention. Its own queries, which see no other token, are "
            f"left out.{stored}"
            + "".join(f" Among later tokens, {sink}." for sink in diagnosis.later_sinks[:_NAMED]),
            "GPT-2 medium 76% and 52%; a GPT-2 with softmax-1 2% and 4% (From Attention to "
            "Activation).",
        ),
        Finding(
            "Lazy layers",
            "bad" if lazy else _level(near / max(1, heads), 0.1, 0.4),
            f"{laziness}; {near} of {heads} heads are near rank 1 and the median head's rank is "
            f"{figures['median_head_rank']:.0f} of {diagnosis.length}."
            + (f" {bounds} ranks are bounds." if bounds else ""),
            "About half of Llama-3-8B's heads are near rank 1 (When Attention Collapses, fig. 11).",
        ),
        Finding(
            "Drained values",
            _level(drained / layers, 0.1, 0.5),
            f"The first token's values have less than half the norm of the others' in "
            f"{drained} of {layers} layers; "
            + ("all values are zero." if lowest is None else f"at the lowest, {lowest:.2f} of it."),
            "ResFormer keeps about 0.7 (Value Residual Learning, appendix A.2).",
        ),
        Finding(
            "Outlier activations",
            _level(max(first, rest), 12.0, 60.0),
            f"Mean kurtosis is {_format_finite(first, '.1f')} at the first token and "
            f"{_format_finite(rest, '.1f')} at the rest (a Gaussian has 3); the largest activation "
            f"of the first token is {_format_finite(figures['max_activation_first'], ',.0f')} on "
            f"average{_largest_outlier_clause(diagnosis)}.",
            "GPT-2 130M 514.9 and 141.5; with softmax-1 and OrthoAdam 10.1 and 7.3 (From Attention "
            "to Activation, table 2).",
        ),
    ]


def _format_finite(value: float | None, style: str) -> str:
    return "not finite" if value is None or math.isinf(value) else format(value, style)


def _level(value: float, good: float, bad: float) -> Level:
    return "good" if value <= good else "bad" if value >= bad else "mixed"


def _largest_outlier_clause(diagnosis: ModelDiagnosis) -> str:
    """Return a clause that names the channel that stands out most: the one with the largest sum of
    peaks over all layers. "" if no layer's outlier channels were measured.
    """
    rows = block_outputs(diagnosis.rows.filter(metric="outlier_channel"))
    if rows.is_empty():
        return ""
    # `variant` is the channel's name, `value` its peak in a layer.
    sums = rows.group_by("variant").agg(pl.col("value").sum()).sort("value", descending=True)
    return f"; {sums['variant'][0]} stands out most"


def head_values(diagnosis: ModelDiagnosis, metric: str, variant: str = "paper") -> pl.DataFrame:
    """Return a metric's rows of heads, sorted by layer and head."""
    rows = diagnosis.rows.filter(metric=metric, variant=variant)
    return rows.filter(pl.col("head").is_not_null()).sort("layer", "head")
