"""Damage of quantization: figures of every scheme, and a grade."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from wakeful.estimates import (
    Estimate,
    finite_or_none,
    format_estimate,
    format_interval,
    interval_half_width,
)
from wakeful.finding import Finding, Level
from wakeful.quantization.measure import Measurement
from wakeful.quantization.peers import Peer
from wakeful.quantization.schemes import Scheme

HARMLESS, SEVERE = 0.02, 0.18
"""Loss increases in nats per token: up to `HARMLESS` (perplexity rises by 2%) the damage is called
harmless, from `SEVERE` on (perplexity rises by a fifth) severe."""
GRADES: Mapping[Level, str] = {
    "good": "harmless", "mixed": "some damage", "bad": "severe damage", "unsure": "not resolved"
}  # fmt: skip
_NUM_WORST = 8
"""Number of the worst layers that the page lists."""


@dataclass(frozen=True)
class Damage:
    """A measurement of quantized models, with their schemes and sizes by scheme name, in the order
    in which they were asked for.
    """

    measurement: Measurement
    schemes: dict[str, Scheme]
    full_bytes: int
    bytes: dict[str, int]
    peers: Sequence[Peer] = ()
    """Other quantized versions of the model, to compare with."""


def scheme_rows(damage: Damage) -> pl.DataFrame:
    """Return a table of losses with one row per scheme and sequence.

    Columns: model, scheme ("" for the full-precision model, a path for another quantized version),
    sequence, tokens, and the sums over tokens nll and kl, in nats.
    """
    counts = damage.measurement.counts
    totals_by_scheme = {"": damage.measurement.full, **damage.measurement.schemes}
    totals_by_scheme |= {peer.name: peer.totals for peer in damage.peers}
    frames = [
        pl.DataFrame(
            {
                "model": [damage.measurement.name] * len(counts),
                "scheme": [name] * len(counts),
                "sequence": range(len(counts)),
                "tokens": counts,
                "nll": totals.nll,
                "kl": totals.divergence or [0.0] * len(counts),  # full precision has none
            }
        )
        for name, totals in totals_by_scheme.items()
    ]
    return pl.concat(frames)


def layer_errors(damage: Damage, scheme: str) -> pl.DataFrame:
    """Return a table of every layer's relative error under a scheme, and of its input's kurtosis
    over all tokens but the first.

    Columns: module, layer, kind, value (the error), standard_error, kurtosis. A figure that is not
    finite becomes null, such as the error of an output that is all zero.
    """
    rows = damage.measurement.layers
    errors = rows.filter(scheme=scheme, metric="relative_error", position="all")
    errors = errors.select("module", "layer", "kind", "value", "standard_error")
    kurtosis = rows.filter(metric="input_kurtosis", position="rest")
    own = kurtosis.filter(scheme=scheme)  # of a model that was rotated before it was quantized
    kurtosis = own if len(own) else kurtosis.filter(scheme="")
    kurtosis = kurtosis.select("module", kurtosis="value")
    errors = errors.join(kurtosis, on="module", how="left", maintain_order="left")
    figures = pl.selectors.float()  # all columns of numbers
    return errors.with_columns(pl.when(figures.is_finite()).then(figures))


def estimate_fields(name: str, estimate: Estimate) -> dict[str, float | None]:
    """Return an estimate as two fields, `name` and `name_standard_error`; a number that is not
    finite becomes None.
    """
    value, error = estimate
    return {name: finite_or_none(value), f"{name}_standard_error": finite_or_none(error)}


def damage_summary(damage: Damage) -> dict[str, Any]:
    """Return a model's figures, and those of every scheme under "schemes", for summary.json.

    A standard error is None where there is one sequence only.
    """
    measurement = damage.measurement
    return {
        "model": measurement.name,
        "sequences": len(measurement.counts),
        "tokens": sum(measurement.counts),
        **estimate_fields("perplexity", measurement.perplexity()),
        "bytes": damage.full_bytes,
        "schemes": [scheme_figures(damage, name) for name in damage.schemes],
    }


def scheme_figures(damage: Damage, name: str) -> dict[str, Any]:
    """Return one scheme's figures by name, for summary.json: losses, bytes and errors of layers.

    "increase" is that of the perplexity, and "ratio" the perplexity over that in full precision. A
    figure that is not finite is None, as are those of layers where only the cache is quantized.
    """
    measurement, scheme = damage.measurement, damage.schemes[name]
    errors = layer_errors(damage, name)
    rows = errors.sort("value", descending=True, nulls_last=True).to_dicts()
    worst = rows[0] if rows else dict.fromkeys(errors.columns)  # a cache alone quantizes no layer
    return {
        "scheme": name,
        "definition": scheme.definition,
        "scales": scheme.scales,
        **estimate_fields("perplexity", measurement.perplexity(name)),
        **estimate_fields("increase", measurement.perplexity_increase(name)),
        **estimate_fields("loss_increase", measurement.loss_increase(name)),
        **estimate_fields("kl", measurement.divergence(name)),
        "ratio": finite_or_none(measurement.perplexity(name)[0] / measurement.perplexity()[0]),
        "bytes": damage.bytes[name],
        "bytes_ratio": damage.bytes[name] / damage.full_bytes,
        "layer_error_median": errors["value"].median(),
        "layer_error_worst": worst["value"],
        "worst_layer": worst["module"],
        "worst_layer_kurtosis": worst["kurtosis"],
    }


def damage_findings(damage: Damage) -> list[Finding]:
    """Return one finding per scheme: how much it harms the model, with figures and a
    description.
    """
    return [
        Finding(name, *_grade_and_explain(damage, name), _describe_scheme(scheme))
        for name, scheme in damage.schemes.items()
    ]


def grade_damage(damage: Damage, name: str) -> Level:
    """Return how much a scheme harms the model, by the loss increase: "good" up to `HARMLESS`,
    "bad" from `SEVERE` on or if it is not finite, and "mixed" between.

    It is "unsure" where the 95% interval (Student's t) of the loss increase includes zero and
    reaches beyond `HARMLESS`.
    """
    loss, error = damage.measurement.loss_increase(name)
    if finite_or_none(loss) is None:
        return "bad"
    radius = math.inf  # of the interval of a single sequence
    if finite_or_none(error) is not None:
        radius = interval_half_width(error, len(damage.measurement.counts))
    if abs(loss) <= radius and loss + radius > HARMLESS:
        return "unsure"
    if loss >= SEVERE:
        return "bad"
    return "good" if loss <= HARMLESS else "mixed"


def _grade_and_explain(damage: Damage, name: str) -> tuple[Level, str]:
    """Return a scheme's grade and the sentences that justify it: the change of the loss, and the
    worst and the median layer's error.
    """
    figures, level = scheme_figures(damage, name), grade_damage(damage, name)
    loss, perplexity = figures["loss_increase"], figures["perplexity"]
    if loss is None or perplexity is None:
        return "bad", "The quantized model's loss is not finite."
    original_perplexity = damage.measurement.perplexity()[0]
    num_sequences = len(damage.measurement.counts)
    error = figures["loss_increase_standard_error"]
    change = f"{format_interval(loss, error, num_sequences, '+')} nats per token"
    change += "" if error is None else ", ± its 95% interval,"
    doubt = ", too little text to tell it from zero" if level == "unsure" else ""
    if not figures["worst_layer"]:  # the cache alone is quantized
        layers = "No layer's weights change."
    elif figures["layer_error_worst"] is None:
        layers = "No layer's relative error is finite."
    else:
        layers = (
            f"The worst layer, {figures['worst_layer']}, is off by "
            f"{figures['layer_error_worst']:.1%}; the median layer by "
            f"{figures['layer_error_median']:.1%}. "
            f"Weights take {figures['bytes_ratio']:.0%} of their original size."
        )
    return level, (
        f"The loss changes by {change} on the same text{doubt} (perplexity "
        f"{format_estimate(original_perplexity)} to {format_estimate(perplexity)}). {layers}"
    )


def _describe_scheme(scheme: Scheme) -> str:
    """Return a scheme's number formats, and which of them are emulated or calibrated."""
    scales = f", {scheme.scales} activation scales" if scheme.activations else ""
    emulated = ", emulated" if scheme.emulated or scheme.cache else ""
    return f"{scheme.definition}{scales}{emulated}"


def worst_layers(damage: Damage, name: str) -> list[dict[str, Any]]:
    """Return the rows of `layer_errors` with the largest relative errors, the largest first."""
    errors = layer_errors(damage, name).sort("value", descending=True, nulls_last=True)
    return errors.head(_NUM_WORST).to_dicts()
