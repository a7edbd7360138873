"""Damage of quantization: figures of every scheme, kurtosis as a predictor, a verdict."""

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
"""Nats per token: a loss increase up to the first (perplexity rises by 2%) is called harmless, one
from the second on (by a fifth) severe."""
GRADES: Mapping[Level, str] = {
    "good": "harmless", "mixed": "some damage", "bad": "severe damage", "unsure": "not resolved"
}  # fmt: skip
_WORST = 8
"""Number of the worst layers that the page lists."""
_STRONG = 0.5
"""From this rank correlation on, kurtosis is said to predict the damage."""
_FEW = 5
"""Fewer models than these cannot show a rank correlation: four in order may be chance (1 in 12)."""


@dataclass(frozen=True)
class Damage:
    """A measurement with what it is about: schemes and sizes by name, in the order asked."""

    measurement: Measurement
    schemes: dict[str, Scheme]
    full_bytes: int
    bytes: dict[str, int]
    seconds: dict[str, float]
    """Seconds of quantizing, calibration included."""
    parameters: int = 0
    """Of the model before, each counted once."""
    savable: tuple[str, ...] = ()
    """The schemes, measured or w8a8, under which the model can be saved as compressed-tensors."""


def scheme_rows(damage: Damage) -> pl.DataFrame:
    """Return one row a scheme and sequence: model, tokens, nll and kl, both sums in nats.

    The scheme "" is the full-precision model.
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

    Columns: module, layer, kind, value, standard_error, kurtosis_first, kurtosis_rest. Null is what
    is not finite: the error of an output that is all zero, the kurtosis of such an input.
    """
    rows = damage.measurement.layers
    errors = rows.filter(scheme=scheme, metric="relative_error", position=position)
    errors = errors.select("module", "layer", "kind", "value", "standard_error")
    for part in ("first", "rest"):
        shape = rows.filter(metric="input_kurtosis", position=part)
        shape = shape.select("module", pl.col("value").alias(f"kurtosis_{part}"))
        errors = errors.join(shape, on="module", how="left", maintain_order="left")
    figures = pl.selectors.float()
    return errors.with_columns(pl.when(figures.is_finite()).then(figures))


def _mean_kurtosis(damage: Damage, position: str) -> float | None:
    """Return the mean over blocks' outputs; None where it is not finite."""
    rows = damage.measurement.layers.filter(metric="kurtosis", position=position, kind="block")
    return finite_or_none(mean_over_layers(rows))


def named(name: str, estimate: Estimate) -> dict[str, float | None]:
    """Return a figure and its standard error by their names; what is not finite is null."""
    value, error = estimate
    return {name: finite_or_none(value), f"{name}_standard_error": finite_or_none(error)}


def damage_summary(damage: Damage) -> dict[str, Any]:
    """Return the figures of every scheme; an error that one sequence cannot give is null."""
    measurement = damage.measurement
    return {
        "model": measurement.name,
        "sequences": len(measurement.counts),
        "tokens": sum(measurement.counts),
        **named("perplexity", measurement.perplexity()),
        "parameters": damage.parameters,
        "bytes": damage.full_bytes,
        **{
            f"kurtosis_{position}": _mean_kurtosis(damage, position)
            for position in ("first", "rest")
        },
        "schemes": [scheme_figures(damage, name) for name in damage.schemes],
        "kurtosis_predicts": predicts([damage]),
    }


def scheme_figures(damage: Damage, name: str) -> dict[str, Any]:
    """Return one scheme's figures."""
    measurement, scheme = damage.measurement, damage.schemes[name]
    errors = layer_errors(damage, name)
    rows = errors.sort("value", descending=True, nulls_last=True).to_dicts()
    worst = rows[0] if rows else dict.fromkeys(errors.columns)  # of a cache alone, no layer is
    return {
        "scheme": name,
        "definition": scheme.definition,
        "scales": scheme.scales,
        **named("perplexity", measurement.perplexity(name)),
        **named("increase", measurement.increase(name)),
        **named("loss_increase", measurement.loss_increase(name)),
        **named("kl", measurement.divergence(name)),
        "ratio": finite_or_none(measurement.perplexity(name)[0] / measurement.perplexity()[0]),
        "bytes": damage.bytes[name],
        "bytes_ratio": damage.bytes[name] / damage.full_bytes,
        "layer_error_median": errors["value"].median(),
        "layer_error_worst": worst["value"],
        "worst_layer": worst["module"],
        "worst_layer_kurtosis_first": worst["kurtosis_first"],
        "worst_layer_kurtosis_rest": worst["kurtosis_rest"],
        "error_follows_kurtosis": follows(errors, "kurtosis_rest"),
        "quantize_seconds": damage.seconds[name],
        "read_seconds": measurement.schemes[name].seconds,
    }


def follows(errors: pl.DataFrame, shape: str) -> float | None:
    """Return Spearman's ρ between `value` and a column; None for fewer than three rows."""
    finite_rows = _finite_rows(errors, shape)
    if len(finite_rows) < 3:
        return None
    return finite_or_none(finite_rows.select(pl.corr("value", shape, method="spearman")).item())


def _finite_rows(errors: pl.DataFrame, shape: str) -> pl.DataFrame:
    return errors.filter(pl.col("value").is_finite() & pl.col(shape).is_finite())


def over_layers(damages: Sequence[Damage], scheme: str) -> pl.DataFrame:
    """Return `layer_errors` of several models one after another."""
    return pl.concat(
        layer_errors(damage, scheme).with_columns(model=pl.lit(damage.measurement.name))
        for damage in damages
    )


def over_models(damages: Sequence[Damage], scheme: str) -> pl.DataFrame:
    """Return each model's loss increase as `value`, and its `kurtosis_rest`: of all but the first
    token, the mean over blocks.
    """
    return pl.DataFrame(
        {
            "value": [damage.measurement.loss_increase(scheme)[0] for damage in damages],
            "kurtosis_rest": [_mean_kurtosis(damage, "rest") for damage in damages],
        },
        schema={"value": pl.Float64, "kurtosis_rest": pl.Float64},
    )


def predicts(damages: Sequence[Damage]) -> str:
    """Say whether kurtosis predicts the damage: over all layers, and over models.

    It does where Spearman's ρ is at least 0.5 and its t, ρ√((n − 2)/(1 − ρ²)), beyond the 97.5%
    quantile; weakly where the latter alone holds.
    """
    schemes = list(damages[0].schemes)
    layers = {name: over_layers(damages, name) for name in schemes}
    text = _sentence("Over layers, the kurtosis of a layer's input", "its error", layers)
    if len(damages) == 1:
        return text
    if len(damages) < _FEW:
        return f"{text} {len(damages)} models are too few to tell: it takes {_FEW}."
    models = {name: over_models(damages, name) for name in schemes}
    more = _sentence(
        f"Over {len(damages)} models, the mean kurtosis of blocks' outputs",
        "the loss increase",
        models,
    )
    return f"{text} {more}"


def _sentence(predictor: str, damage: str, frames: Mapping[str, pl.DataFrame]) -> str:
    groups: dict[str, list[str]] = {"predicts": [], "weakly predicts": [], "does not predict": []}
    for name, frame in frames.items():
        rho = follows(frame, "kurtosis_rest")
        if rho is not None:
            count = len(_finite_rows(frame, "kurtosis_rest"))
            groups[_strength(rho, count)].append(f"{name} (ρ = {rho:+.2f})")
    clauses = [
        f"{verb} {damage} under {', '.join(names)}" for verb, names in groups.items() if names
    ]
    if not clauses:
        return f"{predictor} and {damage} cannot be correlated."
    return f"{predictor} {'; it '.join(clauses)}.".replace("-", "−")


def _strength(rho: float, count: int) -> str:
    away = abs(rho) * math.sqrt((count - 2) / max(1e-12, 1 - rho**2))
    if rho <= 0 or away < student_quantile(count - 2):
        return "does not predict"
    return "predicts" if rho >= _STRONG else "weakly predicts"


def damage_findings(damage: Damage) -> list[Finding]:
    """Return the verdict on each scheme."""
    return [
        Finding(name, *_grade_and_words(damage, name), describe(scheme))
        for name, scheme in damage.schemes.items()
    ]


def grade(damage: Damage, name: str) -> Level:
    """Return how much a scheme harms the model; "unsure" where the 95% interval (Student's t) of
    the loss increase holds zero and reaches past what is harmless.
    """
    loss, error = damage.measurement.loss_increase(name)
    if finite_or_none(loss) is None:
        return "bad"
    far = (
        interval_half_width(error, len(damage.measurement.counts))
        if finite_or_none(error) is not None
        else math.inf
    )
    if abs(loss) <= far and loss + far > HARMLESS:
        return "unsure"
    return "good" if loss <= HARMLESS else "bad" if loss >= SEVERE else "mixed"


def _grade_and_words(damage: Damage, name: str) -> tuple[Level, str]:
    """Return the grade and the words of a scheme's finding."""
    figures, level = scheme_figures(damage, name), grade(damage, name)
    loss, after = figures["loss_increase"], figures["perplexity"]
    if loss is None or after is None:
        return "bad", "The quantized model's loss is not finite."
    before = damage.measurement.perplexity()[0]
    count = len(damage.measurement.counts)
    error = figures["loss_increase_standard_error"]
    change = f"{format_interval(loss, error, count, '+')} nats per token"
    change += "" if error is None else ", ± its 95% interval,"
    doubt = ", which so little text cannot tell from zero" if level == "unsure" else ""
    layers = "No layer's weights change."
    if figures["worst_layer"]:
        layers = "No layer's relative error is known."
    if figures["layer_error_worst"] is not None:
        layers = (
            f"The worst layer, {figures['worst_layer']}, is off by "
            f"{figures['layer_error_worst']:.1%}; the median layer by "
            f"{figures['layer_error_median']:.1%}. "
            f"Weights take {figures['bytes_ratio']:.0%} of their original size."
        )
    return level, (
        f"The loss changes by {change} on the same text{doubt} (perplexity "
        f"{format_estimate(before)} to {format_estimate(after)}). {layers}"
    )


def describe(scheme: Scheme) -> str:
    """Return a scheme in plain words."""
    parts = [(part, grid) for part, grid in scheme.activations]
    if scheme.weights is not None:
        parts.insert(0, ("weights", scheme.weights))
    descriptions = [grid.description.format(part) for part, grid in parts]
    descriptions = [part.replace("per channel", "per output channel") for part in descriptions]
    if scheme.cache is not None:
        head = " and head" if scheme.cache.per != "tensor" else ""
        descriptions.append(scheme.cache.description.format("keys and values") + head)
    if scheme.method is not None:
        descriptions.append(f"by {scheme.method}")
    rest = "activations in full precision"
    if scheme.activations:
        rest = f"{scheme.scales} activation scales"
    emulated = ", emulated" if scheme.emulated or scheme.cache else ""
    return f"{', '.join(descriptions)}; {rest}{emulated}."


def worst_layers(damage: Damage, name: str) -> list[dict[str, Any]]:
    """Return the layers whose error is the largest, with it at the first token and at the rest."""
    errors = layer_errors(damage, name)
    for position in ("first", "rest"):
        alone = layer_errors(damage, name, position).select("module", **{position: "value"})
        errors = errors.join(alone, on="module", how="left")
    return errors.sort("value", descending=True, nulls_last=True).head(_WORST).to_dicts()
