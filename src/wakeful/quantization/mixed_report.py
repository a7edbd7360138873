"""Sentences, figures and the report section about a model with a format for each layer."""

import math
import shlex
from functools import partial
from typing import Any

import altair as alt
import polars as pl
import torch

from wakeful.estimates import (
    Estimate,
    finite_or_none,
    format_estimate,
    format_interval,
    interval_half_width,
)
from wakeful.paths import free_folder
from wakeful.quantization.damage import Damage, estimate_fields
from wakeful.quantization.format_search import MIXED, MixedModel
from wakeful.quantization.measure import Totals
from wakeful.quantization.tuning import Tuning
from wakeful.reports import charts
from wakeful.reports.value import Chart, NextStep, Section, Table, Text

_NOTABLE_SHARE = 0.05
"""Least share of a file's bytes that is worth a further step."""


def smallest_larger_uniform(damage: Damage) -> str | None:
    """Return the name of the smallest uniform format (one for all layers) that takes at least as
    many bytes as the mixed model; None if there is none.
    """
    mixed_bytes = damage.bytes[MIXED]
    larger = [
        name for name in damage.schemes if name != MIXED and damage.bytes[name] >= mixed_bytes
    ]
    return min(larger, key=lambda name: damage.bytes[name], default=None)


def compare_to_uniform(damage: Damage) -> dict[str, Any]:
    """Return how the mixed model's loss compares with that of a uniform format of no fewer bytes.

    "against" is the uniform format's name; None if no format takes as many bytes, and then there is
    no "difference". That is the paired difference of mean losses in nats per token, on text by
    which no format was selected. "verdict" is the result in words.
    """
    against = smallest_larger_uniform(damage)
    result: dict[str, Any] = {"against": against, "verdict": "nothing to compare with"}
    if against is None:
        return result
    difference = damage.measurement.loss_increase(MIXED, against)
    verdict = f"{_judge_difference(damage, difference)} uniform"
    return result | {"verdict": verdict, **estimate_fields("difference", difference)}


def _judge_difference(damage: Damage, difference: Estimate) -> str:
    """Return "better than", "worse than" or, if the 95% interval of a difference of losses includes
    zero, "not better than".
    """
    mean, error = difference
    radius = interval_half_width(error, len(damage.measurement.counts))
    if mean + radius < 0:
        return "better than"
    return "worse than" if mean - radius > 0 else "not better than"


def compare_to_peers(damage: Damage) -> list[dict[str, Any]]:
    """Return figures of each other quantized version of the model, and the mixed model's loss minus
    its: "difference", paired, in nats per token. "verdict" is the result in words.
    """
    measurement, rows = damage.measurement, list[dict[str, Any]]()
    for peer in damage.peers:
        difference = measurement.loss_difference(measurement.schemes[MIXED], peer.totals)
        increase = measurement.loss_difference(peer.totals, measurement.full)
        verdict = "nothing to compare with: its loss is not finite"
        if math.isfinite(increase[0]):
            verdict = f"{_judge_difference(damage, difference)} {peer.name}"
        rows.append(
            {
                "source": peer.name, "bytes": peer.bytes, "verdict": verdict,
                **estimate_fields("loss_increase", increase),
                **estimate_fields("kl", measurement.mean_kl(peer.totals)),
                **estimate_fields("difference", difference),
            }
        )  # fmt: skip
    return rows


def peer_sentences(damage: Damage) -> list[str]:
    """Return a sentence for each other quantized version of the model, which compares the mixed
    model with it.
    """
    return [
        f"The loss of {peer.name} is not finite."
        if row["loss_increase"] is None
        else f"{_compare_in_words(damage, row['verdict'], peer.name, peer.totals, peer.bytes)}."
        for row, peer in zip(compare_to_peers(damage), damage.peers, strict=True)
    ]


def comparison_sentence(damage: Damage, mixed: MixedModel) -> str:
    """Return a sentence that compares a mixed model with a uniform format of no fewer bytes."""
    result, measurement = compare_to_uniform(damage), damage.measurement
    against, num_sequences = result["against"], len(measurement.counts)
    rotation = mixed.rotation_name
    after = f" after the rotation {rotation}" if rotation else ""
    if against is None:
        increase = format_interval(*measurement.loss_increase(MIXED), num_sequences, "+")
        return f"The chosen formats{after} raise the loss by {increase} nats per token."
    other = f"{against}{' without a rotation' if rotation else ''}"
    totals, num_bytes = measurement.schemes[against], damage.bytes[against]
    words = _compare_in_words(damage, result["verdict"], other, totals, num_bytes, after)
    return f"{words} (± its 95% interval, on {num_sequences} sequences that chose nothing)."


def _compare_in_words(
    damage: Damage, verdict: str, other: str, totals: Totals, num_bytes: int, after: str = ""
) -> str:
    """Return the verdict and, of the mixed model and the `other` one, loss increase and megabytes,
    with their difference; without a full stop.
    """
    measurement, count = damage.measurement, len(damage.measurement.counts)
    mixed = measurement.schemes[MIXED]
    increase, other_increase = (
        format_interval(*measurement.loss_difference(each, measurement.full), count, "+")
        for each in (mixed, totals)
    )
    difference = format_interval(*measurement.loss_difference(mixed, totals), count, "+")
    return (
        f"{verdict[0].upper()}{verdict[1:]}: the chosen formats{after} raise the loss by "
        f"{increase} nats per token in {damage.bytes[MIXED] / 1e6:,.1f} MB, {other} by "
        f"{other_increase} in {num_bytes / 1e6:,.1f} MB; difference, paired: {difference}"
    )


def describe_formats(mixed: MixedModel) -> str:
    """Return a phrase with the bits per weight and the number of layers in each format."""
    counts = ", ".join(f"{count} {name}" for name, count in mixed.counts.items())
    return (
        f"{mixed.bits:.3f} bits per weight of {len(mixed.formats)} layers, scales included: "
        f"{counts}; embeddings and what else stays take {mixed.other_bytes / 1e6:,.1f} MB"
    )


def describe_tuning(mixed: MixedModel) -> str:
    """Return a sentence on the effect of training the scales, which begins with the full stop of
    the sentence before and lacks its own; "" if they were not trained.
    """
    tuning = mixed.tuning
    if tuning is None:
        return ""
    if not tuning.steps:
        return ". The chosen formats have no scales to train"
    kl_before, kl_after = format_estimate(tuning.before[0]), format_estimate(tuning.after[0])
    outcome = "the trained scales are used"
    if not tuning.improved:
        outcome = "which its interval does not tell from chance: the untrained scales are used"
    return (
        f". Scales trained for {tuning.steps} steps, codes fixed: KL on text that trained nothing "
        f"{kl_before} to {kl_after} nats per token, {outcome}"
    )


def describe_selection(mixed: MixedModel, num_sequences: int) -> str:
    """Return sentences on how the formats were chosen by `num_sequences` sequences of calibration
    text, with the predicted cost and its lower bound.
    """
    allocation = mixed.allocation
    return (
        f"{describe_formats(mixed)}. Of {num_sequences} calibration sequences every fourth scored "
        "the formats, ½ Σ g² Δy² by one backward pass, and the rest rounded them; layers that an "
        f"engine fuses share one. Predicted cost {allocation.cost:.4f} nats per token; no "
        f"allocation of as many bytes has a predicted cost below {allocation.bound:.4f}"
        f"{describe_tuning(mixed)}"
    )


def mixed_model_summary(mixed: MixedModel, damage: Damage) -> dict[str, Any]:
    """Return the figures of a model with a format for each layer, for summary.json.

    "bound" is a predicted cost that no allocation of these bytes can go below; "proof" compares
    measured losses with those of a uniform format.
    """
    chosen = mixed.allocation
    return {
        "bits": mixed.bits, "bytes": damage.bytes[MIXED], "layer_bytes": chosen.bytes,
        "other_bytes": mixed.other_bytes, "predicted_cost": finite_or_none(chosen.cost),
        "bound": finite_or_none(chosen.bound), "formats": dict(mixed.formats),
        "proof": compare_to_uniform(damage), "peers": compare_to_peers(damage),
        "tuning": _tuning_figures(mixed.tuning),
        "curve": [{"bytes": size, "cost": cost} for size, cost in mixed.frontier],
        "rotation": None if mixed.rotation is None else mixed.rotation.summary,
    }  # fmt: skip


def _tuning_figures(tuning: Tuning | None) -> dict[str, Any] | None:
    """Return the result of training the scales for summary.json; None if they were not trained."""
    if tuning is None:
        return None
    before = estimate_fields("kl_before", tuning.before)
    after = estimate_fields("kl_after", tuning.after)
    return {"steps": tuning.steps, "kept": tuning.improved, **before, **after}


def steps_to_narrower_types(mixed: MixedModel, source: str) -> list[NextStep]:
    """Return a command that stores in bfloat16 what is not quantized, if that is stored in float32
    now and the file would be notably smaller.

    `source` is the model's name as the user gave it.
    """
    saving = mixed.other_bytes // 2
    if mixed.stored_dtype != torch.float32 or saving < _NOTABLE_SHARE * mixed.bytes[MIXED]:
        return []
    model = source.rstrip("/")
    folder = str(free_folder(f"{model}-bfloat16"))
    text = (
        "embeddings and what else stays are stored in float32: in bfloat16 they take "
        f"{saving / 1e6:,.1f} MB less; quantize the folder that this writes"
    )
    return [NextStep(text, shlex.join(["wakeful", "export", model, folder, "--dtype", "bfloat16"]))]


def mixed_model_section(damage: Damage, mixed: MixedModel) -> Section:
    """Return the report's section about a model with a format for each layer."""
    rows = [[name, f"{count}"] for name, count in mixed.counts.items()]
    return Section("The smallest file", [
        *map(Text, [comparison_sentence(damage, mixed), *peer_sentences(damage)]),
        Text(f"{describe_formats(mixed)}{describe_tuning(mixed)}."),
        Table(["format", "layers"], rows, "Layers of each format"),
        Chart("Loss increase against bytes", partial(_draw_frontier, damage, mixed)),
        Text("The line is the predicted loss increase of the best formats for each number of "
             "bytes; points are measured, with their 95% intervals, on text that did not choose "
             "the formats.",
             "note"),
    ])  # fmt: skip


def _draw_frontier(damage: Damage, mixed: MixedModel) -> charts.Drawing:
    """Draw loss increase over bytes: the predicted frontier as a line, measured models as points.

    The points, with their 95% intervals, are the mixed model, the uniform formats, and models of
    other tools.
    """
    measurement, rows = damage.measurement, list[dict[str, Any]]()
    models = [(name, damage.bytes[name], measurement.schemes[name]) for name in damage.schemes]
    models += [(peer.name, peer.bytes, peer.totals) for peer in damage.peers]
    for name, size, totals in models:
        increase, error = measurement.loss_difference(totals, measurement.full)
        radius = interval_half_width(error, len(measurement.counts))
        rows.append({"format": name, "MB": size / 1e6, "loss": increase,
                     "low": increase - radius, "high": increase + radius})  # fmt: skip
    max_megabytes = 1.1 * max(row["MB"] for row in rows)  # the line ends a little beyond the points
    line = pl.DataFrame(
        [{"MB": (size + mixed.other_bytes) / 1e6, "loss": cost} for size, cost in mixed.frontier]
    ).filter(pl.col("MB") <= max_megabytes)
    x = alt.X("MB:Q", title="MB of weights", scale=alt.Scale(zero=False))
    y = alt.Y("loss:Q", title="loss increase, nats per token")
    frontier = alt.Chart(charts.round_digits(line)).mark_line(color="gray").encode(x=x, y=y)
    base = alt.Chart(charts.round_digits(pl.DataFrame(rows)))
    color = charts.encode_colors("format", [row["format"] for row in rows])
    bars = base.mark_rule().encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=color)
    points = base.mark_point(filled=True, size=80, opacity=1).encode(
        x=x, y=y, color=color, tooltip=["format:N", "MB:Q", "loss:Q"]
    )
    return charts.wide(alt.layer(frontier, bars, points), 300)
