"""Sentences, figures and the page's section about a model of chosen formats."""

from functools import partial
from typing import Any

import altair as alt
import polars as pl

from wakeful.estimates import finite_or_none, format_estimate, format_interval, interval_half_width
from wakeful.quantization.damage import Damage, named
from wakeful.quantization.smallest import MIXED, Smallest
from wakeful.quantization.tuning import Tuning
from wakeful.reports import charts
from wakeful.reports.value import Chart, Section, Table, Text


def uniform_reference(damage: Damage) -> str | None:
    """Return the smallest uniform format that takes no fewer bytes than the chosen ones."""
    size = damage.bytes[MIXED]
    larger = [name for name in damage.schemes if name != MIXED and damage.bytes[name] >= size]
    return min(larger, key=lambda name: damage.bytes[name], default=None)


def proof(damage: Damage) -> dict[str, Any]:
    """Return the loss of the chosen formats less that of uniform ones in no fewer bytes, paired
    over sequences that chose nothing, and the verdict.
    """
    against, count = uniform_reference(damage), len(damage.measurement.counts)
    result: dict[str, Any] = {"against": against, "verdict": "nothing to compare with"}
    if against is None:
        return result
    value, error = damage.measurement.loss_increase(MIXED, against)
    verdict = "not better than uniform"
    far = interval_half_width(error, count)
    if value + far < 0:
        verdict = "better than uniform"
    elif value - far > 0:
        verdict = "worse than uniform"
    return result | {"verdict": verdict, **named("difference", (value, error))}


def proof_words(damage: Damage) -> str:
    """Return the proof in a sentence."""
    result, count = proof(damage), len(damage.measurement.counts)
    against = result["against"]
    rise = format_interval(*damage.measurement.loss_increase(MIXED), count, "+")
    if against is None:
        return f"The chosen formats raise the loss by {rise} nats per token."
    reference_rise = format_interval(*damage.measurement.loss_increase(against), count, "+")
    gap = format_interval(result["difference"], result["difference_standard_error"], count, "+")
    sentence = (
        f"{result['verdict'].capitalize()}: the chosen formats raise the loss by {rise} nats per "
        f"token in {damage.bytes[MIXED] / 1e6:,.1f} MB, {against} by {reference_rise} in "
        f"{damage.bytes[against] / 1e6:,.1f} MB; paired, {gap} (± its 95% interval, on {count} "
        "sequences that chose nothing)."
    )
    return sentence.replace("-", "−")


def format_words(smallest: Smallest) -> str:
    """Return how many layers have each format."""
    counts = ", ".join(f"{count} {name}" for name, count in smallest.counts.items())
    return (
        f"{smallest.bits:.3f} bits per weight of {len(smallest.formats)} layers, scales included: "
        f"{counts}; embeddings and what else stays take {smallest.other_bytes / 1e6:,.1f} MB"
    )


def tuning_words(smallest: Smallest) -> str:
    """Return what training the scales did; empty where it was not asked for."""
    tuning = smallest.tuning
    if tuning is None:
        return ""
    before, after = (format_estimate(value) for value, _ in (tuning.before, tuning.after))
    outcome = "and they stay"
    if not tuning.improved:
        outcome = "which its interval does not tell from chance: the untrained ones stay"
    return (
        f". Scales trained for {tuning.steps} steps, codes fixed: KL on text that trained nothing "
        f"{before} to {after} nats per token, {outcome}"
    )


def method_words(smallest: Smallest, sequences: int) -> str:
    """Return how the formats were chosen."""
    chosen = smallest.allocation
    return (
        f"{format_words(smallest)}. Of {sequences} calibration sequences every fourth scored the "
        "formats, ½ Σ g² Δy² by one backward pass, and the rest rounded them; layers that an "
        f"engine fuses take one. Predicted cost {chosen.cost:.4f} nats per token; no allocation "
        f"of as many bytes has a predicted cost below {chosen.bound:.4f}{tuning_words(smallest)}"
    )


def smallest_summary(smallest: Smallest, damage: Damage) -> dict[str, Any]:
    """Return the figures of the choice."""
    chosen = smallest.allocation
    return {
        "bits": smallest.bits, "bytes": damage.bytes[MIXED], "layer_bytes": chosen.bytes,
        "other_bytes": smallest.other_bytes, "predicted_cost": finite_or_none(chosen.cost),
        "bound": finite_or_none(chosen.bound), "formats": dict(smallest.formats),
        "proof": proof(damage), "tuning": _tuning(smallest.tuning),
        "curve": [{"bytes": size, "cost": cost} for size, cost in smallest.curve],
    }  # fmt: skip


def _tuning(tuning: Tuning | None) -> dict[str, Any] | None:
    if tuning is None:
        return None
    return {"steps": tuning.steps, "kept": tuning.improved, **named("kl_before", tuning.before),
            **named("kl_after", tuning.after)}  # fmt: skip


def smallest_section(damage: Damage, smallest: Smallest) -> Section:
    """Return the page's section about the chosen formats."""
    rows = [[name, f"{count}"] for name, count in smallest.counts.items()]
    return Section("The smallest file", [
        Text(proof_words(damage)),
        Text(f"{format_words(smallest)}{tuning_words(smallest)}."),
        Table(["format", "layers"], rows, "Layers of each format"),
        Chart("Loss increase against bytes", partial(_curve, damage, smallest)),
        Text("The line is what scores predict of the best choice within each number of bytes; "
             "points are measured, with their 95% intervals, on text that chose nothing.", "note"),
    ])  # fmt: skip


def _curve(damage: Damage, smallest: Smallest) -> charts.Drawing:
    """Draw the predicted frontier, and what was measured of the chosen and of uniform formats."""
    count = len(damage.measurement.counts)
    rows = []
    for name in damage.schemes:
        value, error = damage.measurement.loss_increase(name)
        far = interval_half_width(error, count)
        rows.append({"format": name, "MB": damage.bytes[name] / 1e6, "loss": value,
                     "low": value - far, "high": value + far})  # fmt: skip
    rightmost = 1.1 * max(row["MB"] for row in rows)
    line = pl.DataFrame(
        [{"MB": (size + smallest.other_bytes) / 1e6, "loss": cost}
         for size, cost in smallest.curve]
    ).filter(pl.col("MB") <= rightmost)  # fmt: skip
    x = alt.X("MB:Q", title="MB of weights", scale=alt.Scale(zero=False))
    y = alt.Y("loss:Q", title="loss increase, nats per token")
    frontier = alt.Chart(charts.round_digits(line)).mark_line(color="gray").encode(x=x, y=y)
    base = alt.Chart(charts.round_digits(pl.DataFrame(rows)))
    color = charts.encode_colors("format", [*damage.schemes])
    bars = base.mark_rule().encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=color)
    points = base.mark_point(filled=True, size=80, opacity=1).encode(
        x=x, y=y, color=color, tooltip=["format:N", "MB:Q", "loss:Q"]
    )
    return charts.wide(alt.layer(frontier, bars, points), 300)
