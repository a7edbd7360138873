"""Charts of a comparison."""

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from wakeful.comparison.reading import Comparison
from wakeful.comparison.tables import (
    followed,
    heads_over_steps,
    paired_difference,
    relative_training_loss,
    summary_table,
    training_loss,
)
from wakeful.pages.charts import (
    SHARE,
    Drawing,
    colored,
    dashed,
    dashes,
    heatmap,
    line_at,
    readable_lines,
    rounded,
    tip,
    tips,
)

_MEASURES = (
    ("parameters", "parameters_ratio"),
    ("KV cache a token", "cache_ratio"),
    ("tokens a second", "speed_ratio"),
)
_FOLLOWED = {
    "bos_mass_other": "attention on BOS, no copy due",
    "bos_mass_trigger": "attention on BOS at triggers",
    "value_drain_first": "BOS's value norm over the others'",
    "residual_peak_first": "BOS's residual norm over the others'",
    "excess_loss": "loss over the task's own (nats)",
}
"""The axis of each figure that is followed over steps."""
_MOST_CURVES = 12
"""In one chart; past them nobody finds a line in its legend."""
_STEPS = alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=8, tickMinStep=1))


def with_curves(comparison: Comparison) -> list[str]:
    """Return the variants to draw over steps: all, or the baseline and those of the lowest loss."""
    if len(comparison.drawn) <= _MOST_CURVES:
        return list(comparison.drawn)
    gaps = {name: paired_difference(comparison, name)[0] for name in comparison.variants[1:]}
    paired = [name for name, gap in gaps.items() if not math.isnan(gap)]
    best = sorted(paired, key=gaps.__getitem__)[: _MOST_CURVES - 1]
    return [name for name in comparison.drawn if name in {comparison.baseline, *best}]


def relative_loss_chart(comparison: Comparison, window: int) -> Drawing | None:
    """Draw each variant's smoothed training loss minus the baseline's, below zero is better."""
    frame = relative_training_loss(comparison, window)
    if frame.is_empty():
        return None
    # The first steps are all initialization; averaging starts to mean something after a window.
    shown = [name for name in with_curves(comparison) if name != comparison.baseline]
    steady = frame.filter(
        pl.col("step") >= pl.col("step").max().clip(upper_bound=window),
        pl.col("variant").is_in(shown),
    )
    if steady.is_empty():
        return None
    y = alt.Y("difference:Q", title=f"training loss minus {comparison.baseline} (nats)")
    lines = _curves(comparison, steady.select("variant", "step", "difference"), y, "+.4f", shown)
    layers: list[Any] = [line_at("y", 0.0, "zero"), *lines]
    band = steady.select("variant", "step", "low", "high").drop_nulls()
    if not band.is_empty():
        area = alt.Chart(rounded(band)).mark_area(opacity=0.18)
        area = area.encode(
            x=_STEPS, y=alt.Y("low:Q"), y2=alt.Y2("high:Q"), color=_color(comparison)
        )
        layers.insert(1, area)
    chart = alt.layer(*layers).properties(height=320, width="container")
    return chart.resolve_legend(color="independent", strokeDash="independent")


def training_loss_chart(comparison: Comparison, window: int) -> Drawing:
    """Draw the smoothed training loss of each variant's first seed."""
    shown = with_curves(comparison)
    frame = training_loss(comparison, window).filter(pl.col("variant").is_in(shown))
    y = alt.Y("loss:Q", title="training loss (nats a token)", scale=alt.Scale(zero=False))
    lines = _curves(comparison, frame, y, ".4f", shown)
    chart = alt.layer(*lines).properties(height=280, width="container")
    return chart.resolve_legend(color="independent", strokeDash="independent")


def followed_charts(comparison: Comparison) -> list[tuple[str, Drawing]]:
    """Draw what the variants' heads came to over steps, a title and a chart a figure.

    Each line is the mean over seeds, its band ± one standard error.
    """
    shown = with_curves(comparison)
    table = followed(comparison).filter(pl.col("variant").is_in(shown))
    charts: list[tuple[str, Drawing]] = []
    for name, title in _FOLLOWED.items():
        frame = table.filter(pl.col("figure") == name)
        if frame.is_empty():
            continue
        value, error = pl.col("value"), pl.col("error")
        y = alt.Y("value:Q", title=title)
        lines = _curves(comparison, frame.select("variant", "step", "value"), y, ".4f", shown)
        band = frame.filter(error.is_finite()).select(
            "variant", "step", low=value - error, high=value + error
        )
        layers: list[Any] = [*lines]
        if not band.is_empty():
            area = alt.Chart(rounded(band)).mark_area(opacity=0.18)
            layers.insert(
                0,
                area.encode(
                    x=_STEPS, y=alt.Y("low:Q"), y2=alt.Y2("high:Q"), color=_color(comparison)
                ),
            )
        chart = alt.layer(*layers).properties(height=260, width="container")
        charts.append((title, chart.resolve_legend(color="independent", strokeDash="independent")))
    return charts


def head_charts(comparison: Comparison) -> list[tuple[str, list[tuple[str, Drawing]]]]:
    """Draw what each layer and head came to over steps, a title a figure and a chart a variant.

    Colors are those of one scale in all charts of a figure.
    """
    shown = with_curves(comparison)
    table = heads_over_steps(comparison).filter(pl.col("variant").is_in(shown))
    charts: list[tuple[str, list[tuple[str, Drawing]]]] = []
    for name, title in _FOLLOWED.items():
        frame = table.filter(pl.col("figure") == name)
        if frame.is_empty():
            continue
        largest = max(1.0, *frame["value"])
        domain = SHARE if name.startswith("bos_mass") else (0.0, largest)
        head = "key/value head" if name.startswith("value_drain") else "head"
        of_each: list[tuple[str, Drawing]] = [
            (variant, _over_steps(frame.filter(pl.col("variant") == variant), domain, head))
            for variant in shown
            if variant in frame["variant"]
        ]
        charts.append((title, of_each))
    return charts


def _over_steps(frame: pl.DataFrame, domain: tuple[float, float], head: str) -> Drawing:
    """Draw a line of cells for each layer and head, called `head`, and a cell a diagnosis."""
    places = frame.select("layer", "head").unique(maintain_order=True)
    name = "layer" if places["head"].null_count() else f"layer, {head}"
    label = pl.concat_str("layer", "head", separator=", ", ignore_nulls=True)
    cells = frame.select("step", "value", place=label)
    x = alt.X("step:O", title="training step", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    order = places.select(label).to_series().to_list()
    y = alt.Y("place:O", title=name, sort=order, axis=alt.Axis(labelOverlap=True))
    tooltip = [alt.Tooltip("place:N", title=name), *tips("step:Q"), tip("value", ".3~g")]
    legend = alt.Legend(title=None, orient="bottom", gradientLength=160, tickCount=3)
    chart = heatmap(rounded(cells), x, y, "value", legend, domain=domain, tooltip=tooltip)
    return chart.properties(height=18 * len(places), width="container")


def difference_chart(comparison: Comparison) -> Drawing | None:
    """Draw each variant's paired difference in final validation loss, ± one standard error."""
    difference, error = pl.col("difference"), pl.col("difference_error")
    table = summary_table(comparison).filter(
        pl.col("variant") != comparison.baseline, difference.is_finite()
    )
    if table.is_empty():
        return None
    frame = table.select(
        "variant", difference, error, low=difference - error, high=difference + error
    )
    y = alt.Y("variant:N", title=None, sort=list(comparison.variants))
    title = f"final validation loss minus {comparison.baseline} (nats)"
    color = _color(comparison)
    points = alt.Chart(frame).mark_point(filled=True, size=90, opacity=1)
    points = points.encode(
        x=alt.X("difference:Q", title=title, axis=alt.Axis(tickCount=8)),
        y=y,
        color=color,
        tooltip=[
            alt.Tooltip("variant:N"),
            tip("difference", "+.4f"),
            tip("difference_error", ".4f", title="standard error"),
        ],
    )
    bars = alt.Chart(frame.filter(error.is_finite())).mark_rule(strokeWidth=2)
    bars = bars.encode(x=alt.X("low:Q"), x2=alt.X2("high:Q"), y=y, color=color)
    chart = alt.layer(line_at("x", 0.0, "zero"), bars, points)
    return chart.properties(height=34 * len(frame), width="container")


def cost_charts(comparison: Comparison) -> list[tuple[str, Drawing]]:
    """Draw parameters, cache and speed as ratios to the baseline's: a title and a chart each."""
    table = summary_table(comparison)
    if len(table) == 1:
        return []
    return [(title, _cost(comparison, table, title, column)) for title, column in _MEASURES]


def _cost(comparison: Comparison, table: pl.DataFrame, title: str, column: str) -> Drawing:
    frame = rounded(table.select("variant", ratio=column).drop_nulls())
    largest = max((1.0, *frame["ratio"]))
    base = alt.Chart(frame).encode(
        x=alt.X(
            "ratio:Q",
            title=f"ratio to {comparison.baseline}",
            # Room for the figure behind the longest bar.
            scale=alt.Scale(domain=[0, largest * 1.35], nice=False),
            axis=alt.Axis(values=[0, 1], format="d"),
        ),
        y=alt.Y("variant:N", title=None, sort=list(comparison.variants)),
        tooltip=[alt.Tooltip("variant:N"), tip("ratio", ".3f", title=title)],
    )
    bars = base.mark_bar().encode(color=_color(comparison))
    figures = base.mark_text(align="left", dx=4).encode(text=alt.Text("ratio:Q", format=".3f"))
    chart = alt.layer(bars, figures)
    return chart.properties(height=26 * len(frame), width="container", title=title)


def _curves(
    comparison: Comparison, frame: pl.DataFrame, y: alt.Y, style: str, shown: Sequence[str]
) -> list[alt.Chart]:
    """Draw a line over steps for each variant, with a legend of those `shown`."""
    names = list(comparison.names)
    legend = alt.Legend(values=list(shown))
    tooltip = [*tips("variant:N", "step:Q"), tip(frame.columns[-1], style)]
    dash = dashed("variant", names, dashes(names), legend=legend)
    color = _color(comparison, legend)
    return readable_lines(frame, "variant", _STEPS, y, tooltip, "step", color, dash)


def _color(comparison: Comparison, legend: Any = None) -> alt.Color:
    """Return the variants' colors, which do not change from chart to chart."""
    return colored("variant", comparison.names, legend=legend)
