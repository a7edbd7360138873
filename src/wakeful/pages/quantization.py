"""What quantization did: figures for a summary, plain words, charts, and one offline HTML page."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
from rich.table import Table as Grid
from rich.text import Text

from wakeful.estimates import Estimate, finite, reach, student_quantile, with_error
from wakeful.pages.charts import (
    Drawing,
    colored,
    colors,
    dashed,
    heatmap,
    line_at,
    nearest,
    rounded,
    tip,
    tips,
    unchecked,
    wide,
)
from wakeful.pages.diagnosis import Finding, Level
from wakeful.pages.page import Step, listed, write_page
from wakeful.pages.pretrained import PrintedRow
from wakeful.quant.measure import Measurement
from wakeful.quant.schemes import Scheme

_FREE, _HEAVY = 1.02, 1.2
"""Up to this ratio of perplexities a scheme is called harmless, and from that one severe."""
_WORST = 8
"""How many of the worst layers the page lists."""
_POSITIONS = ("rest", "first")
_GRAY = "#7F7F7F"
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
    """What quantizing took, calibration included."""
    parameters: int = 0
    """Of the model before, each counted once."""
    printed: PrintedRow | None = None
    """The model's row in a published table."""


def scheme_rows(damage: Damage) -> pl.DataFrame:
    """Return one row a scheme and sequence: tokens, nll and kl, both sums in nats.

    The scheme "" is the full-precision model.
    """
    counts = damage.measurement.counts
    frames = [
        pl.DataFrame(
            {
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

    Columns: module, layer, kind, value, standard_error, kurtosis_first, kurtosis_rest,
    max_over_mean_first, max_over_mean_rest.
    """
    rows = damage.measurement.layers
    found = rows.filter(scheme=scheme, metric="relative_error", position=position)
    found = found.select("module", "layer", "kind", "value", "standard_error")
    for metric in ("kurtosis", "max_over_mean"):
        for part in ("first", "rest"):
            shape = rows.filter(metric=f"input_{metric}", position=part)
            shape = shape.select("module", pl.col("value").alias(f"{metric}_{part}"))
            found = found.join(shape, on="module", how="left", maintain_order="left")
    return found


def block_values(damage: Damage, metric: str, scheme: str, position: str) -> pl.DataFrame:
    """Return a block metric over layers: layer, value, standard_error."""
    rows = damage.measurement.layers
    rows = rows.filter(scheme=scheme, metric=metric, position=position, kind="block")
    return rows.select("layer", "value", "standard_error").sort("layer")


def summary(damage: Damage) -> dict[str, Any]:
    """Return the figures of every scheme; an error that one sequence cannot give is null."""
    measurement = damage.measurement
    perplexity, error = measurement.perplexity()
    return {
        "model": measurement.name,
        "sequences": len(measurement.counts),
        "tokens": sum(measurement.counts),
        "perplexity": perplexity,
        "perplexity_standard_error": finite(error),
        "parameters": damage.parameters,
        "bytes": damage.full_bytes,
        **{
            f"kurtosis_{position}": block_values(damage, "kurtosis", "", position)["value"].mean()
            for position in ("first", "rest")
        },
        "schemes": [scheme_figures(damage, name) for name in damage.schemes],
        "kurtosis_predicts": predicts([damage]),
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
    found = errors.sort("value", descending=True, nulls_last=True).to_dicts()
    worst = found[0] if found else dict.fromkeys(errors.columns)  # of a cache alone, no layer is
    return figures | {
        "ratio": finite(measurement.perplexity(name)[0] / measurement.perplexity()[0]),
        "bytes": damage.bytes[name],
        "bytes_ratio": damage.bytes[name] / damage.full_bytes,
        "layer_error_median": errors["value"].median(),
        "layer_error_worst": worst["value"],
        "worst_layer": worst["module"],
        "worst_layer_kurtosis_first": worst["kurtosis_first"],
        "worst_layer_kurtosis_rest": worst["kurtosis_rest"],
        "error_follows_kurtosis": follows(errors, "kurtosis_rest"),
        "error_follows_max_over_mean": follows(errors, "max_over_mean_rest"),
        "quantize_seconds": damage.seconds[name],
        "read_seconds": measurement.schemes[name].seconds,
    }


def follows(errors: pl.DataFrame, shape: str) -> float | None:
    """Return Spearman's ρ between `value` and a column; None for fewer than three rows."""
    known = errors.filter(pl.col("value").is_finite() & pl.col(shape).is_finite())
    if len(known) < 3:
        return None
    return finite(known.select(pl.corr("value", shape, method="spearman")).item())


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
            "kurtosis_rest": [
                block_values(damage, "kurtosis", "", "rest")["value"].mean() for damage in damages
            ],
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


def _sentence(what: str, damage: str, frames: Mapping[str, pl.DataFrame]) -> str:
    groups: dict[str, list[str]] = {"predicts": [], "weakly predicts": [], "does not predict": []}
    for name, frame in frames.items():
        rho = follows(frame, "kurtosis_rest")
        if rho is not None:
            groups[_strength(rho, len(frame))].append(f"{name} (ρ = {rho:+.2f})")
    told = [f"{verb} {damage} under {', '.join(names)}" for verb, names in groups.items() if names]
    if not told:
        return f"{what} cannot be set against {damage}."
    return f"{what} {'; it '.join(told)}.".replace("-", "−")


def _strength(rho: float, count: int) -> str:
    away = abs(rho) * math.sqrt((count - 2) / max(1e-12, 1 - rho**2))
    if rho <= 0 or away < student_quantile(count - 2):
        return "does not predict"
    return "predicts" if rho >= _STRONG else "weakly predicts"


def findings(damage: Damage) -> list[Finding]:
    """Return the verdict on each scheme."""
    return [
        Finding(name, *_judged(damage, name), describe(scheme))
        for name, scheme in damage.schemes.items()
    ]


def _judged(damage: Damage, name: str) -> tuple[Level, str]:
    """Return the level and the words of a scheme's finding."""
    figures = scheme_figures(damage, name)
    before = damage.measurement.perplexity()[0]
    ratio, after = figures["ratio"], figures["perplexity"]
    if ratio is None or after is None:
        return "bad", "The quantized model's loss is not finite."
    loss, error = figures["loss_increase"], figures["loss_increase_standard_error"]
    sure = ""
    if error is not None:
        unsure = abs(loss) <= reach(error, len(damage.measurement.counts))
        doubt = ", too close to zero to tell on so little text" if unsure else ""
        sure = f" (loss {with_error(loss, error, '+')} nats{doubt})"
    return (
        "good" if ratio <= _FREE else "bad" if ratio >= _HEAVY else "mixed",
        f"Perplexity goes from {with_error(before)} to {with_error(after)}{sure}. "
        + (
            f"Its worst layer, {figures['worst_layer']}, is off by "
            f"{figures['layer_error_worst']:.1%}; the median layer by "
            f"{figures['layer_error_median']:.1%}. "
            f"Weights take {figures['bytes_ratio']:.0%} of what they did."
            if figures["worst_layer"]
            else "No layer's weights change."
        ),
    )


def describe(scheme: Scheme) -> str:
    """Return a scheme in plain words."""
    parts = [(part, grid) for part, grid in scheme.activations]
    if scheme.weights is not None:
        parts.insert(0, ("weights", scheme.weights))
    told = [grid.words.format(part) for part, grid in parts]
    told = [each.replace("per channel", "per output channel") for each in told]
    if scheme.cache is not None:
        told.append(scheme.cache.words.format("keys and values") + " and head")
    if scheme.method is not None:
        told.append(f"by {scheme.method}")
    rest = "activations in full precision"
    if scheme.activations:
        rest = f"{scheme.scales} activation scales"
    emulated = ", emulated" if scheme.emulated or scheme.cache else ""
    return f"{', '.join(told)}; {rest}{emulated}."


def damage_grid(damage: Damage) -> Grid:
    """Return one row a scheme, the full-precision model first; layer errors are medians."""
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    grid.add_column("scheme", no_wrap=True)
    for column in ("perplexity", "increase", "KL (nats)", "error", "worst", "MB"):
        grid.add_column(column, justify="right")
    full = summary(damage)
    before = with_error(full["perplexity"], full["perplexity_standard_error"])
    grid.add_row("full", before, "", "", "", "", f"{damage.full_bytes / 1e6:,.2f}")
    for figures in full["schemes"]:
        told = with_errors(figures)
        shares = (figures["layer_error_median"], figures["layer_error_worst"])
        grid.add_row(
            Text(figures["scheme"]),
            *(told[key] for key in ("perplexity", "increase", "kl")),
            *("–" if share is None else f"{share:.1%}" for share in shares),
            f"{figures['bytes'] / 1e6:,.2f}",
        )
    return grid


def before_and_after(damage: Damage) -> Iterator[str]:
    """Yield the only scheme's figures as rows of a model card's table."""
    full = summary(damage)
    (figures,) = full["schemes"]
    before = with_error(full["perplexity"], full["perplexity_standard_error"])
    text = f"{full['sequences']} windows of a text, {full['tokens']:,} tokens"
    yield f"| perplexity on {text} | {before} | {with_errors(figures)['perplexity']} |"
    yield f"| MB | {damage.full_bytes / 1e6:,.2f} | {figures['bytes'] / 1e6:,.2f} |"


def with_errors(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return a scheme's estimates as they are shown."""
    return {
        key: with_error(figures[key], figures[f"{key}_standard_error"])
        for key in ("perplexity", "increase", "loss_increase", "kl")
    }


def charts(damage: Damage) -> list[tuple[str, Drawing]]:
    """Return every chart with a name fit for a file."""
    names = [
        (f"layers-{n}", name)
        for n, (name, scheme) in enumerate(damage.schemes.items())
        if scheme.weights is not None
    ]
    return [
        ("layer-error", layer_error(damage)),
        ("input-kurtosis", _input_kurtosis(damage)),
        ("block-error", _block_error(damage)),
        ("block-kurtosis", _block_kurtosis(damage)),
        ("error-against-kurtosis", _scatter(damage)),
        *((file, _layer_map(damage, name)) for file, name in names),
    ]


_TITLES = {
    "layer-error": "Relative error of each block's layers",
    "input-kurtosis": "Kurtosis of the inputs of each block's layers",
    "block-error": "Relative error of each block's output",
    "block-kurtosis": "Kurtosis of each block's output",
    "error-against-kurtosis": "Error of layers against the kurtosis of their inputs",
}


def titled(damage: Damage) -> list[tuple[str, Drawing]]:
    """Return every chart with a title for a paper."""
    drawn = dict(charts(damage))
    layers = [
        (f"Relative error of every layer under {name}", drawn[f"layers-{n}"])
        for n, name in enumerate(damage.schemes)
        if f"layers-{n}" in drawn
    ]
    return [*((title, drawn[name]) for name, title in _TITLES.items()), *layers]


def layer_error(damage: Damage) -> Drawing:
    """Draw the relative error of the layers of each block: their root mean square."""
    frames = {
        (name, position): _over_blocks(
            layer_errors(damage, name, position), pl.col("value"), squared=True
        )
        for name in damage.schemes
        for position in _POSITIONS
    }
    return _errors(damage, frames, "relative error of layers")


def _block_error(damage: Damage) -> Drawing:
    """Draw the relative error of each block's output, with all errors before it."""
    frames = {
        (name, position): block_values(damage, "block_error", name, position)
        for name in damage.schemes
        for position in _POSITIONS
    }
    return _errors(damage, frames, "relative error of the block's output")


def _input_kurtosis(damage: Damage) -> Drawing:
    """Draw the kurtosis of the inputs of each block's layers, first token and the rest."""
    errors = max((layer_errors(damage, name) for name in damage.schemes), key=len)
    frames = {
        position: _over_blocks(errors, pl.col(f"kurtosis_{position}"), squared=False)
        for position in _POSITIONS
    }
    return _kurtosis(frames, "kurtosis of layers' inputs")


def _block_kurtosis(damage: Damage) -> Drawing:
    """Draw the kurtosis of each block's output, first token and the rest."""
    frames = {position: block_values(damage, "kurtosis", "", position) for position in _POSITIONS}
    return _kurtosis(frames, "kurtosis of the block's output")


def _scatter(damage: Damage) -> Drawing:
    """Draw every layer's relative error against the kurtosis of its input."""
    frames = [
        layer_errors(damage, name).select(
            pl.lit(name).alias("scheme"), "module", "value", kurtosis="kurtosis_rest"
        )
        for name in damage.schemes
    ]
    color = colored("scheme", [*damage.schemes], legend=alt.Legend())
    return wide(error_over_kurtosis(pl.concat(frames), "scheme", color), 300)


def error_over_kurtosis(
    frame: pl.DataFrame, of: str, color: alt.Color, *more: alt.Tooltip
) -> alt.Chart:
    """Draw a point a layer: its relative error, `value`, over the `kurtosis` of its input.

    `of` is the column that points are colored by.
    """
    frame = frame.filter((pl.col("value") > 0) & (pl.col("kurtosis") > 0))
    chart = alt.Chart(rounded(frame)).mark_point(filled=True, size=26, opacity=0.65)
    return chart.encode(
        x=alt.X(
            "kurtosis:Q",
            title="kurtosis of the layer's input (all but the first token)",
            scale=alt.Scale(type="log", nice=False, padding=8),
            axis=alt.Axis(format="~g", tickCount=5),
        ),
        y=_log("relative error", "~p", padding=8),
        color=color,
        tooltip=[
            alt.Tooltip(f"{of}:N"),
            alt.Tooltip("module:N"),
            tip("kurtosis", ".4~g"),
            *more,
            _ERROR,
        ],
    )


_ERRORS = (0.001, 1.0)
"""The scale of a layer's relative error, in the map of every scheme and model."""


def _layer_map(damage: Damage, scheme: str) -> Drawing:
    """Draw a scheme's relative error of every layer: blocks by kinds of layer."""
    errors = layer_errors(damage, scheme).drop_nulls("layer")
    kinds = errors["kind"].unique(maintain_order=True).to_list()
    chart = heatmap(
        rounded(errors.select("layer", "kind", "value", "module")),
        alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        alt.Y("kind:N", title=None, sort=kinds),
        "value",
        alt.Legend(title="relative error", format="~p", tickCount=4),
        type="log",
        domain=_ERRORS,
        tooltip=[alt.Tooltip("module:N"), _ERROR],
    )
    return wide(chart, 22 * len(kinds))


def _over_blocks(errors: pl.DataFrame, value: pl.Expr, *, squared: bool) -> pl.DataFrame:
    """Return one row a block: the (root) mean (square) of its layers' values."""
    mean = value.pow(2).mean().sqrt() if squared else value.mean()
    known = errors.drop_nulls("layer").filter(value.is_finite())
    return known.group_by("layer").agg(value=mean).sort("layer")


def _errors(damage: Damage, frames: Mapping[tuple[str, str], pl.DataFrame], title: str) -> Drawing:
    frame = pl.concat(
        frame.select("layer", "value", scheme=pl.lit(scheme), position=pl.lit(position))
        for (scheme, position), frame in frames.items()
    )
    color = colored("scheme", [*damage.schemes], legend=None)
    base = alt.Chart(rounded(frame.filter(pl.col("value") > 0))).encode(x=_LAYERS, color=color)
    y = _log(title, "~p")
    lines = base.mark_line(strokeWidth=2).encode(y=y, strokeDash=_dash(None))
    tooltip = [*tips("scheme:N", "position:N", "layer:Q"), _ERROR]
    return wide(alt.layer(lines, nearest(base, tooltip, y)), 240)


def _kurtosis(frames: Mapping[str, pl.DataFrame], title: str) -> Drawing:
    frame = pl.concat(
        frame.select("layer", "value", position=pl.lit(position))
        for position, frame in frames.items()
    )
    base = alt.Chart(rounded(frame.filter(pl.col("value") > 0))).encode(x=_LAYERS)
    y = _log(title, "~g")
    lines = base.mark_line(strokeWidth=2, color=_GRAY).encode(y=y, strokeDash=_dash(alt.Legend()))
    tooltip = [*tips("position:N", "layer:Q"), tip("value", ".4~g", title="kurtosis")]
    gaussian = line_at("y", 3.0, "gaussian", tooltip=alt.value("a Gaussian has 3"))
    return wide(alt.layer(gaussian, lines, nearest(base, tooltip, y)), 240)


_LAYERS = alt.X("layer:Q", title="layer", axis=alt.Axis(format="d", tickMinStep=1))
_ERROR = tip("value", ".3~%", title="relative error")


def _log(title: str, style: str, **scale: Any) -> alt.Y:
    axis = alt.Axis(format=style, tickCount=5)
    return alt.Y("value:Q", title=title, scale=alt.Scale(type="log", **scale), axis=axis)


def _dash(legend: alt.Legend | None) -> alt.StrokeDash:
    return dashed("position", _POSITIONS, ([1, 0], [4, 3]), legend=legend)


_LEVELS: Mapping[Level, str] = {"good": "harmless", "mixed": "some damage", "bad": "severe"}


def headline(damage: Damage) -> str:
    """Return in a sentence which schemes harm the model, and how much."""
    said: dict[str, list[str]] = {}
    for finding in findings(damage):
        said.setdefault(_LEVELS[finding.level], []).append(finding.title)
    told = "; ".join(f"{level}: {listed(names)}" for level, names in said.items())
    return f"{damage.measurement.name} quantized: {told}."


def next_step(damage: Damage, source: str) -> Step:
    """Return how to save the smallest harmless model, or how to make it easier to quantize."""
    model = shlex.quote(source)
    harmless = [each.title for each in findings(damage) if each.level == "good"]
    if not harmless:
        return Step("no scheme is harmless: turn the outliers away first",
                    f"wakeful cure {model} --rotate hadamard")  # fmt: skip
    best = min(harmless, key=lambda name: damage.bytes[name])
    command = f"wakeful quantize {model} --scheme {shlex.quote(best)} --save {model}-quantized"
    return Step("save the smallest harmless one", command)


def after_saving(source: str, folder: str) -> list[Step]:
    """Return what to do with a quantized model in a folder and the model that it was made of."""
    model, small = shlex.quote(source), shlex.quote(folder)
    return [
        Step("set it beside the model it was made of, its speed too",
             f"wakeful evaluate {model} {small} --speed 512"),
        Step("read what it writes", f'wakeful generate {small} --prompt "Once upon a time"'),
    ]  # fmt: skip


@unchecked
def write_quantization(
    damage: Damage,
    path: str | Path,
    *,
    title: str,
    method: Mapping[str, Any],
    saved: Mapping[str, Any] | None,
    source: str = "",
) -> Path:
    """Write the page; an old page stays until the new one is whole.

    `source` is what the model was asked for as, for a command to type.
    """
    full, source = summary(damage), source or damage.measurement.name
    steps = after_saving(source, saved["folder"]) if saved else [next_step(damage, source)]
    return write_page(
        path,
        "quantization",
        title=title,
        headlines=[headline(damage)],
        steps=steps,
        method=method,
        saved=saved,
        full=full,
        findings=findings(damage),
        rows=[figures | with_errors(figures) for figures in full["schemes"]],
        before=with_error(full["perplexity"], full["perplexity_standard_error"]),
        colors=colors(damage.schemes),
        drawn=dict(charts(damage)),
        worst=[worst_layers(damage, name) for name in damage.schemes],
    )


def worst_layers(damage: Damage, name: str) -> list[dict[str, Any]]:
    """Return the layers whose error is the largest, with it at the first token and at the rest."""
    errors = layer_errors(damage, name)
    for position in ("first", "rest"):
        alone = layer_errors(damage, name, position).select("module", **{position: "value"})
        errors = errors.join(alone, on="module", how="left")
    return errors.sort("value", descending=True, nulls_last=True).head(_WORST).to_dicts()
