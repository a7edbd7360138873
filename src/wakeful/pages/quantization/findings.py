"""What quantization did, in figures for a summary and in plain words."""

import math
from dataclasses import dataclass
from typing import Any

import polars as pl
from rich.table import Table as Grid
from rich.text import Text

from wakeful.estimates import Estimate, finite, reach
from wakeful.pages.diagnosis.findings import Finding
from wakeful.quant.measure import Measurement
from wakeful.quant.schemes import Scheme

_FREE, _HEAVY = 1.02, 1.2
"""Up to this ratio of perplexities a scheme is called harmless, and from that one severe."""


@dataclass(frozen=True)
class Damage:
    """A measurement with what it is about: schemes and sizes by name, in the order asked."""

    measurement: Measurement
    schemes: dict[str, Scheme]
    full_bytes: int
    bytes: dict[str, int]

    @property
    def counts(self) -> list[int]:
        """Predicted tokens of each sequence."""
        return self.measurement.counts


def scheme_rows(damage: Damage) -> pl.DataFrame:
    """Return one row a scheme and sequence: tokens, nll and kl, both sums in nats.

    The scheme "" is the full-precision model.
    """
    measurement = damage.measurement
    frames = []
    for name, totals in {"": measurement.full, **measurement.schemes}.items():
        size = len(measurement.counts)
        frames.append(
            pl.DataFrame(
                {
                    "scheme": [name] * size,
                    "sequence": range(size),
                    "tokens": measurement.counts,
                    "nll": totals.nll,
                    "kl": totals.divergence or [0.0] * size,
                }
            )
        )
    return pl.concat(frames)


def layer_errors(damage: Damage, scheme: str, position: str = "all") -> pl.DataFrame:
    """Return every layer's relative error under a scheme, beside its input's kurtosis.

    Columns: module, layer, kind, value, standard_error, kurtosis_first, kurtosis_rest.
    """
    rows = damage.measurement.layers
    found = rows.filter(
        (pl.col("scheme") == scheme)
        & (pl.col("metric") == "relative_error")
        & (pl.col("position") == position)
    ).select("module", "layer", "kind", "value", "standard_error")
    for part in ("first", "rest"):
        kurtosis = rows.filter(
            (pl.col("metric") == "input_kurtosis") & (pl.col("position") == part)
        ).select("module", pl.col("value").alias(f"kurtosis_{part}"))
        found = found.join(kurtosis, on="module", how="left", maintain_order="left")
    return found


def block_values(damage: Damage, metric: str, scheme: str, position: str) -> pl.DataFrame:
    """Return a block metric over layers: layer, value, standard_error."""
    return (
        damage.measurement.layers.filter(
            (pl.col("scheme") == scheme)
            & (pl.col("metric") == metric)
            & (pl.col("position") == position)
            & (pl.col("kind") == "block")
        )
        .select("layer", "value", "standard_error")
        .sort("layer")
    )


def summary(damage: Damage) -> dict[str, Any]:
    """Return the figures of every scheme; an error that one sequence cannot give is null."""
    measurement = damage.measurement
    perplexity, error = measurement.perplexity()
    kurtosis = {
        f"kurtosis_{position}": block_values(damage, "kurtosis", "", position)["value"].mean()
        for position in ("first", "rest")
    }
    return {
        "model": measurement.name,
        "sequences": len(measurement.counts),
        "tokens": sum(measurement.counts),
        "perplexity": perplexity,
        "perplexity_standard_error": finite(error),
        "bytes": damage.full_bytes,
        **kurtosis,
        "schemes": [scheme_figures(damage, name) for name in damage.schemes],
    }


def scheme_figures(damage: Damage, name: str) -> dict[str, Any]:
    """Return one scheme's figures."""
    measurement, scheme = damage.measurement, damage.schemes[name]
    figures: dict[str, Any] = {"scheme": name, "definition": scheme.definition,
                               "scales": scheme.scales}  # fmt: skip
    estimates: dict[str, Estimate] = {
        "perplexity": measurement.perplexity(name),
        "increase": measurement.increase(name),
        "loss_increase": measurement.loss_increase(name),
        "kl": measurement.divergence(name),
    }
    for key, (value, error) in estimates.items():
        figures[key] = finite(value)
        figures[f"{key}_standard_error"] = finite(error)
    errors = layer_errors(damage, name)
    worst = errors.sort("value", descending=True, nulls_last=True).row(0, named=True)
    return figures | {
        "ratio": finite(measurement.perplexity(name)[0] / measurement.perplexity()[0]),
        "bytes": damage.bytes[name],
        "bytes_ratio": damage.bytes[name] / damage.full_bytes,
        "layer_error_median": errors["value"].median(),
        "layer_error_worst": worst["value"],
        "worst_layer": worst["module"],
        "worst_layer_kurtosis_first": worst["kurtosis_first"],
        "worst_layer_kurtosis_rest": worst["kurtosis_rest"],
        "error_follows_kurtosis": follows_kurtosis(errors),
    }


def follows_kurtosis(errors: pl.DataFrame) -> float | None:
    """Return Spearman's ρ between layers' errors and their inputs' kurtosis at the rest."""
    known = errors.filter(pl.col("value").is_finite() & pl.col("kurtosis_rest").is_finite())
    if len(known) < 3:
        return None
    found = known.select(pl.corr("value", "kurtosis_rest", method="spearman")).item()
    return finite(found)


def findings(damage: Damage) -> list[Finding]:
    """Return the verdict on each scheme."""
    return [_finding(damage, name) for name in damage.schemes]


def _finding(damage: Damage, name: str) -> Finding:
    figures = scheme_figures(damage, name)
    before = damage.measurement.perplexity()[0]
    ratio, after = figures["ratio"], figures["perplexity"]
    if ratio is None or after is None:
        return Finding(name, "bad", "The quantized model's loss is not finite.",
                       describe(damage.schemes[name]))  # fmt: skip
    error = figures["loss_increase_standard_error"]
    sure = ""
    if error is not None:
        sure = f" (loss {with_digits(figures['loss_increase'], error, sign='+')} nats"
        unsure = abs(figures["loss_increase"]) <= reach(error, len(damage.counts))
        sure += ", too close to zero to tell on so little text)" if unsure else ")"
    worst = (
        f"Its worst layer, {figures['worst_layer']}, is off by {figures['layer_error_worst']:.1%}; "
        f"the median layer by {figures['layer_error_median']:.1%}."
    )
    size = f"Weights take {figures['bytes_ratio']:.0%} of what they did."
    level = "good" if ratio <= _FREE else "bad" if ratio >= _HEAVY else "mixed"
    text = (
        f"Perplexity goes from {_rounded(before, 4)} to {_rounded(after, 4)}{sure}. {worst} {size}"
    )
    return Finding(name, level, text, describe(damage.schemes[name]))


def describe(scheme: Scheme) -> str:
    """Return a scheme in plain words."""
    parts = [f"{scheme.weights.grid.bits}-bit weights per {_words(scheme.weights.per)}"]
    for part, rule in scheme.activations:
        parts.append(f"{rule.grid.bits}-bit {part} per {rule.per}")
    text = ", ".join(parts)
    if not scheme.activations:
        return f"{text}; activations in full precision."
    return f"{text}; {scheme.scales} activation scales."


def damage_grid(damage: Damage) -> Grid:
    """Return one row a scheme, the full-precision model first; layer errors are medians."""
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    grid.add_column("scheme", no_wrap=True)
    for column in ("perplexity", "increase", "KL (nats)", "error", "worst", "MB"):
        grid.add_column(column, justify="right")
    full = summary(damage)
    before = with_digits(full["perplexity"], full["perplexity_standard_error"], least=4)
    grid.add_row("full", before, "", "", "", "", f"{damage.full_bytes / 1e6:,.2f}")
    for name in damage.schemes:
        figures = scheme_figures(damage, name)
        grid.add_row(
            Text(name),
            *(
                with_digits(figures[key], figures[f"{key}_standard_error"], least=least)
                for key, least in (("perplexity", 4), ("increase", 2), ("kl", 2))
            ),
            _share(figures["layer_error_median"]),
            _share(figures["layer_error_worst"]),
            f"{figures['bytes'] / 1e6:,.2f}",
        )
    return grid


def with_digits(value: float | None, error: float | None, *, least: int = 1, sign: str = "") -> str:
    """Return "value ± error" to the error's second digit and at least `least` of its own."""
    if value is None:
        return "not finite"
    plus = sign if value > 0 else ""
    if error is None or error == 0:
        return f"{plus}{_rounded(value, 4)}".replace("-", "−")
    if 0 < max(abs(value), error) < 1e-3:
        power = math.floor(math.log10(max(abs(value), error)))
        inner = with_digits(value / 10.0**power, error / 10.0**power, least=least, sign=sign)
        return f"({inner})e{power}".replace("-", "−")
    digits = 2 + math.floor(math.log10(abs(value) or error)) - math.floor(math.log10(error))
    return f"{plus}{_rounded(value, max(least, digits))} ± {_rounded(error, 2)}".replace("-", "−")


def _rounded(value: float, digits: int) -> str:
    """Return a number to so many significant digits, trailing zeros kept."""
    if value == 0 or not 1e-4 < abs(value) < 1e7:
        return f"{value:.{digits - 1}e}" if value else "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(0, places)}f}"


def _words(per: str) -> str:
    return "output channel" if per == "channel" else per


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
