"""Damage of quantization: figures of every scheme, kurtosis as a predictor, and a grade."""

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
    student_quantile,
)  # fmt: skip
from wakeful.finding import Finding, Level
from wakeful.probes.base import mean_over_layers
from wakeful.quantization.measure import Measurement
from wakeful.quantization.schemes import Scheme

HARMLESS, SEVERE = 0.02, 0.18
"""Loss increases in nats per token: up to `HARMLESS` (perplexity rises by 2%) the damage is called
harmless, from `SEVERE` on (perplexity rises by a fifth) severe."""
GRADES: Mapping[Level, str] = {
    "good": "harmless", "mixed": "some damage", "bad": "severe damage", "unsure": "not resolved"
}  # fmt: skip
_NUM_WORST = 8
"""Number of the worst layers that the page lists."""
_STRONG_CORRELATION = 0.5
"""Least rank correlation from which kurtosis is said to predict the damage."""
_MIN_MODELS = 5
"""Least number of models for a rank correlation: four in order may be chance (1 in 12)."""


@dataclass(frozen=True)
class Damage:
    """A measurement of quantized models, with their schemes and sizes by scheme name, in the order
    in which they were asked for.
    """

    measurement: Measurement
    schemes: dict[str, Scheme]
    full_bytes: int
    bytes: dict[str, int]
    seconds: dict[str, float]
    """Seconds of quantizing, calibration included."""
    parameters: int = 0
    """Number of the full-precision model's parameters, shared ones counted once."""
    savable: tuple[str, ...] = ()
    """Those of the schemes, and w8a8, that the model can be saved in as compressed-tensors."""


def scheme_rows(damage: Damage) -> pl.DataFrame:
    """Return a table of losses with one row per scheme and sequence.

    Columns: model, scheme ("" for the full-precision model), sequence, tokens, and the sums over
    tokens nll and kl, in nats.
    """
    counts = damage.measurement.counts
    frames = [
        pl.DataFrame(
            {
                "model": [damage.measurement.name] * len(counts),
                "scheme": [name] * len(counts),
                "sequence": range(len(counts)),
                "tokens": counts,
                "nll": totals.nll,
                "kl": totals.divergence or [0.0] * len(counts),
            }
        )
        for name, totals in {"": damage.measurement.full, **damage.measurement.schemes}.items()
    ]
    return pl.concat(frames)


def layer_errors(damage: Damage, scheme: str, position: str = "all") -> pl.DataFrame:
    """Return every layer's relative error under a scheme, beside its input's kurtosis.

    `position` is "first", "rest" or "all": the tokens of a sequence that the error is of. Columns:
    module, layer, kind, value (the error), standard_error, kurtosis_first, kurtosis_rest. A figure
    that is not finite is null: the error of an output that is all zero, the kurtosis of such an
    input.
    """
    rows = damage.measurement.layers
    errors = rows.filter(scheme=scheme, metric="relative_error", position=position)
    errors = errors.select("module", "layer", "kind", "value", "standard_error")
    for part in ("first", "rest"):
        kurtosis = rows.filter(metric="input_kurtosis", position=part)
        kurtosis = kurtosis.select("module", pl.col("value").alias(f"kurtosis_{part}"))
        errors = errors.join(kurtosis, on="module", how="left", maintain_order="left")
    figures = pl.selectors.float()  # all columns of numbers
    return errors.with_columns(pl.when(figures.is_finite()).then(figures))


def _mean_kurtosis(damage: Damage, position: str) -> float | None:
    """Return the mean over blocks of the kurtosis of their outputs at a position ("first" or
    "rest"); None where it is not finite.
    """
    rows = damage.measurement.layers.filter(metric="kurtosis", position=position, kind="block")
    return finite_or_none(mean_over_layers(rows))


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
        "parameters": damage.parameters,
        "bytes": damage.full_bytes,
        **{
            f"kurtosis_{position}": _mean_kurtosis(damage, position)
            for position in ("first", "rest")
        },
        "schemes": [scheme_figures(damage, name) for name in damage.schemes],
        "kurtosis_predicts": describe_prediction([damage]),
    }


def scheme_figures(damage: Damage, name: str) -> dict[str, Any]:
    """Return one scheme's figures by name, for summary.json: losses, bytes, errors of layers and
    seconds. A figure that is not finite, or of a layer where none is quantized, is None.
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
        "worst_layer_kurtosis_first": worst["kurtosis_first"],
        "worst_layer_kurtosis_rest": worst["kurtosis_rest"],
        "error_follows_kurtosis": rank_correlation(errors, "kurtosis_rest"),
        "quantize_seconds": damage.seconds[name],
        "read_seconds": measurement.schemes[name].seconds,
    }


def rank_correlation(rows: pl.DataFrame, column: str) -> float | None:
    """Return Spearman's ρ between the column `value` and another; None for fewer than three rows.

    Rows in which one of the two is not finite are left out.
    """
    rows = _finite_rows(rows, column)
    if len(rows) < 3:
        return None
    return finite_or_none(rows.select(pl.corr("value", column, method="spearman")).item())


def _finite_rows(rows: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return the rows in which both `value` and the other column are finite."""
    return rows.filter(pl.col("value").is_finite() & pl.col(column).is_finite())


def layer_errors_of_models(damages: Sequence[Damage], scheme: str) -> pl.DataFrame:
    """Return the table `layer_errors` of several models under one scheme, joined, with the column
    model.
    """
    return pl.concat(
        layer_errors(damage, scheme).with_columns(model=pl.lit(damage.measurement.name))
        for damage in damages
    )


def loss_increases_of_models(damages: Sequence[Damage], scheme: str) -> pl.DataFrame:
    """Return a table with one row per model: its loss increase under a scheme (`value`), and the
    kurtosis of its blocks' outputs (`kurtosis_rest`), the mean over blocks at all but the first
    token.
    """
    return pl.DataFrame(
        {
            "value": [damage.measurement.loss_increase(scheme)[0] for damage in damages],
            "kurtosis_rest": [_mean_kurtosis(damage, "rest") for damage in damages],
        },
        schema={"value": pl.Float64, "kurtosis_rest": pl.Float64},
    )


def describe_prediction(damages: Sequence[Damage]) -> str:
    """Return a sentence on whether kurtosis predicts the damage, over layers and over models.

    It predicts where Spearman's ρ is at least 0.5 and significant: its t, ρ√((n − 2)/(1 − ρ²)),
    beyond the 97.5% quantile. It predicts weakly where ρ is significant but smaller.
    """
    schemes = list(damages[0].schemes)
    layers = {name: layer_errors_of_models(damages, name) for name in schemes}
    text = _correlation_sentence(
        "Over layers, the kurtosis of a layer's input", "its error", layers
    )
    if len(damages) == 1:
        return text
    if len(damages) < _MIN_MODELS:
        return f"{text} {len(damages)} models are too few to tell: it takes {_MIN_MODELS}."
    models = {name: loss_increases_of_models(damages, name) for name in schemes}
    predictor = f"Over {len(damages)} models, the mean kurtosis of blocks' outputs"
    return f"{text} {_correlation_sentence(predictor, 'the loss increase', models)}"


def _correlation_sentence(predictor: str, damage: str, frames: Mapping[str, pl.DataFrame]) -> str:
    """Return a sentence on how well kurtosis predicts the damage under each scheme.

    `predictor` and `damage` are the two figures in words; `frames` holds, by scheme, a table of
    both in the columns `kurtosis_rest` and `value`.
    """
    schemes_by_verb: dict[str, list[str]] = {
        "predicts": [], "weakly predicts": [], "does not predict": []
    }  # fmt: skip
    for name, frame in frames.items():
        rho = rank_correlation(frame, "kurtosis_rest")
        if rho is not None:
            num_pairs = len(_finite_rows(frame, "kurtosis_rest"))
            verb = _prediction_strength(rho, num_pairs)
            schemes_by_verb[verb].append(f"{name} (ρ = {rho:+.2f})")
    clauses = [
        f"{verb} {damage} under {', '.join(schemes)}"
        for verb, schemes in schemes_by_verb.items()
        if schemes
    ]
    if not clauses:
        return f"{predictor} and {damage} cannot be correlated."
    return f"{predictor} {'; it '.join(clauses)}.".replace("-", "−")  # the signs of ρ


def _prediction_strength(rho: float, num_pairs: int) -> str:
    """Return in words how well a figure predicts another, by Spearman's ρ of `num_pairs` pairs."""
    t = abs(rho) * math.sqrt((num_pairs - 2) / max(1e-12, 1 - rho**2))
    is_significant = t >= student_quantile(num_pairs - 2)
    if rho <= 0 or not is_significant:
        return "does not predict"
    return "predicts" if rho >= _STRONG_CORRELATION else "weakly predicts"


def damage_findings(damage: Damage) -> list[Finding]:
    """Return one finding per scheme: how much it harms the model, with figures and a
    description.
    """
    return [
        Finding(name, *_grade_and_explain(damage, name), describe_scheme(scheme))
        for name, scheme in damage.schemes.items()
    ]


def grade_damage(damage: Damage, name: str) -> Level:
    """Return how much a scheme harms the model: "good", "mixed", "bad" or "unsure".

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
    """Return a scheme's grade and the sentences that justify it: the loss change and the worst
    layer.
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


def describe_scheme(scheme: Scheme) -> str:
    """Return a sentence that says which tensors a scheme quantizes to which number format."""
    grids = list(scheme.activations)
    if scheme.weights is not None:
        grids.insert(0, ("weights", scheme.weights))
    # A description has a place for the tensor's name: "8-bit {} per token".
    descriptions = [
        grid.description.format(tensor_name).replace("per channel", "per output channel")
        for tensor_name, grid in grids
    ]
    if scheme.cache is not None:
        head = " and head" if scheme.cache.per != "tensor" else ""
        descriptions.append(scheme.cache.description.format("keys and values") + head)
    if scheme.method is not None:
        descriptions.append(f"by {scheme.method}")
    activations = "activations in full precision"
    if scheme.activations:
        activations = f"{scheme.scales} activation scales"
    emulated = ", emulated" if scheme.emulated or scheme.cache else ""
    return f"{', '.join(descriptions)}; {activations}{emulated}."


def worst_layers(damage: Damage, name: str) -> list[dict[str, Any]]:
    """Return the layers with the largest relative error under a scheme, the largest first.

    Each is a row of `layer_errors`, with its errors at the first token and at the rest as `first`
    and `rest`.
    """
    errors = layer_errors(damage, name)
    for position in ("first", "rest"):
        errors_there = layer_errors(damage, name, position)
        errors_there = errors_there.select("module", pl.col("value").alias(position))
        errors = errors.join(errors_there, on="module", how="left")
    errors = errors.sort("value", descending=True, nulls_last=True)
    return errors.head(_NUM_WORST).to_dicts()
