"""What quantization did, drawn: a table for the terminal, charts, and one offline HTML page."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
from rich.table import Table as Grid
from rich.text import Text

from wakeful.config.verbs import LENGTH
from wakeful.estimates import with_error
from wakeful.evaluation.costs import DECODED
from wakeful.evaluation.damage import (
    Damage,
    block_values,
    findings,
    layer_errors,
    summary,
    worst_layers,
)
from wakeful.evaluation.findings import Level
from wakeful.pages.charts import (
    WHOLE,
    Drawing,
    colored,
    colors,
    dashed,
    heatmap,
    line_at,
    nearest,
    opacity,
    rounded,
    shaped,
    shapes,
    switchable,
    tip,
    tips,
    unchecked,
    wide,
)
from wakeful.pages.page import Step, listed, write_page

_POSITIONS = ("rest", "first")
_GRAY = "#7F7F7F"


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
    """Yield the last scheme's figures, which is the model's, as rows of a model card's table."""
    full = summary(damage)
    figures = full["schemes"][-1]
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
    """Return every chart with a name fit for a file; the page has one legend for all schemes."""
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
    return error_over_kurtosis(pl.concat(frames), "scheme", [*damage.schemes], height=300)


def error_over_kurtosis(
    frame: pl.DataFrame, of: str, names: Sequence[str], *more: alt.Tooltip, height: int
) -> Drawing:
    """Draw a point a layer: its relative error, `value`, over the `kurtosis` of its input.

    `of` is the column whose `names` have a color and a shape each.
    """
    x = alt.X(
        "kurtosis:Q",
        title=["kurtosis of the layer's input,", "all but the first token"],
        scale=alt.Scale(type="log", nice=False, padding=8),
        axis=alt.Axis(format="~g", tickCount=5),
    )
    y = _log("relative error", "~p", padding=8)
    frame = rounded(frame.filter((pl.col("value") > 0) & (pl.col("kurtosis") > 0)))
    base = alt.Chart(frame).encode(x=x, color=colored(of, names, legend=None))
    points = base.mark_point(filled=True, size=26).encode(
        y=y, shape=shaped(of, names, legend=None), opacity=opacity(of, 0.65)
    )
    tooltip = [*tips(f"{of}:N", "module:N"), tip("kurtosis", ".4~g"), *more, _ERROR]
    return wide(switchable(alt.layer(points, nearest(base, tooltip, y))), height)


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
    names = [*damage.schemes]
    base = alt.Chart(rounded(frame.filter(pl.col("value") > 0))).encode(
        x=_LAYERS, color=colored("scheme", names, legend=None)
    )
    y = _log(title, "~p")
    lines = base.mark_line(strokeWidth=2).encode(
        y=y, strokeDash=_dash(None), opacity=opacity("scheme")
    )
    marks = base.mark_point(filled=True, size=36).encode(
        y=y, shape=shaped("scheme", names, legend=None), opacity=opacity("scheme")
    )
    tooltip = [*tips("scheme:N", "position:N", "layer:Q"), _ERROR]
    return wide(switchable(alt.layer(lines, marks, nearest(base, tooltip, y))), 240)


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


_LAYERS = alt.X("layer:Q", title="layer", axis=alt.Axis(format="d", tickMinStep=1, labelExpr=WHOLE))
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
        return Step("no scheme is harmless: rotate the outliers away first",
                    f"wakeful cure {model} --rotate hadamard")  # fmt: skip
    best = min(harmless, key=lambda name: damage.bytes[name])
    scheme = shlex.quote(damage.schemes[best].expression)  # which says static where it is
    folder = shlex.quote(f"{source.rstrip('/')}-quantized")
    command = f"wakeful quantize {model} --scheme {scheme} --save {folder}"
    return Step("save the smallest harmless one", command)


def after_saving(source: str, folder: str, context: int) -> list[Step]:
    """Return what to do with a quantized model in a folder and the model that it was made of.

    Its speed is asked for as far as `context` leaves room for a prompt.
    """
    model, small = shlex.quote(source), shlex.quote(folder)
    prompt = min(512, context - DECODED)
    words, speed = (", speed included", f" --speed {prompt}") if prompt > 0 else ("", "")
    return [
        Step(f"compare it with the original{words}", f"wakeful evaluate {model} {small}{speed}"),
        Step("see what it generates", f'wakeful generate {small} --prompt "Once upon a time"'),
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
    context: int = LENGTH,
) -> Path:
    """Write the page; an old page stays until the new one is whole.

    `source` is what the model was asked for as, for a command to type, and `context` most tokens
    that it was made for.
    """
    full, source = summary(damage), source or damage.measurement.name
    steps = [next_step(damage, source)]
    if saved:
        steps = after_saving(source, saved["folder"], context)
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
        names=[*damage.schemes],
        colors=colors(damage.schemes),
        shapes=shapes(damage.schemes),
        drawn=dict(charts(damage)),
        worst=[worst_layers(damage, name) for name in damage.schemes],
    )
