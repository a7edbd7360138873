"""Charts as Vega-Lite: one specification serves the page and the paper's file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import vl_convert

from wakeful.errors import WakefulError
from wakeful.report.tables import (
    Comparison,
    relative_training_loss,
    summary_table,
    training_loss,
)
from wakeful.run import replaced

Drawing = alt.Chart | alt.LayerChart | alt.FacetChart

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F")
"""Okabe and Ito's colours, distinguishable under colour blindness; yellow gives way to violet and
grey, which show on white and on black."""
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [10, 2], [1, 3], [6, 2, 2, 2])
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def relative_loss_chart(comparison: Comparison, window: int) -> Drawing | None:
    """Draw each variant's smoothed training loss minus the baseline's, below zero is better."""
    frame = relative_training_loss(comparison, window)
    if frame.is_empty():
        return None
    # The first steps are all initialisation; averaging starts to mean something after a window.
    steady = frame.filter(pl.col("step") >= min(window, frame["step"].max() or 0))
    base = alt.Chart(steady)
    x = alt.X("step:Q", title="training step")
    colour = _colour(comparison, shown=comparison.variants[1:])
    lines = base.mark_line(strokeWidth=2).encode(
        x=x,
        y=alt.Y("difference:Q", title=f"training loss minus {comparison.baseline} (nats)"),
        color=colour,
        strokeDash=_dash(comparison, shown=comparison.variants[1:]),
        tooltip=[
            alt.Tooltip("variant:N"),
            alt.Tooltip("step:Q"),
            alt.Tooltip("difference:Q", format="+.4f"),
        ],
    )
    zero = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(opacity=0.6).encode(y="zero:Q")
    layers = [zero]
    if comparison.paired_over == "seeds":
        layers.append(
            base.mark_area(opacity=0.18).encode(
                x=x, y="low:Q", y2="high:Q", color=_colour(comparison)
            )
        )
    chart = alt.layer(*layers, lines).properties(height=320, width="container")
    return chart.resolve_legend(color="independent", strokeDash="independent")


def training_loss_chart(comparison: Comparison, window: int) -> Drawing:
    """Draw the smoothed training loss of each variant's first seed."""
    return (
        alt.Chart(training_loss(comparison, window))
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("step:Q", title="training step"),
            y=alt.Y("loss:Q", title="training loss (nats a token)", scale=alt.Scale(zero=False)),
            color=_colour(comparison, shown=comparison.variants),
            strokeDash=_dash(comparison, shown=comparison.variants),
            tooltip=["variant:N", "step:Q", alt.Tooltip("loss:Q", format=".4f")],
        )
        .properties(height=280, width="container")
    )


def difference_chart(comparison: Comparison) -> Drawing | None:
    """Draw each variant's paired difference in final validation loss, ± one standard error."""
    table = summary_table(comparison).filter(pl.col("variant") != comparison.baseline)
    if table.is_empty():
        return None
    frame = table.with_columns(
        low=pl.col("difference") - pl.col("difference_error"),
        high=pl.col("difference") + pl.col("difference_error"),
    )
    base = alt.Chart(frame)
    y = alt.Y("variant:N", title=None, sort=list(comparison.variants))
    title = f"final validation loss minus {comparison.baseline} (nats)"
    colour = _colour(comparison)
    points = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=alt.X("difference:Q", title=title),
        y=y,
        color=colour,
        tooltip=[
            "variant:N",
            alt.Tooltip("difference:Q", format="+.4f"),
            alt.Tooltip("difference_error:Q", format=".4f", title="standard error"),
        ],
    )
    bars = base.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q", y=y, color=colour)
    zero = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(opacity=0.6).encode(x="zero:Q")
    autosize = alt.AutoSizeParams(type="fit-x", contains="padding")
    return alt.layer(zero, bars, points).properties(
        height=alt.Step(34), width="container", autosize=autosize
    )


def cost_chart(comparison: Comparison) -> Drawing | None:
    """Draw parameters, cache and speed of each variant as ratios to the baseline's."""
    table = summary_table(comparison)
    if len(table) < 2:
        return None
    measures = {
        "parameters": "parameters",
        "cache_bytes": "KV cache",
        "tokens_per_second": "tokens a second",
    }
    frame = table.select(
        "variant",
        *(
            (pl.col(column) / pl.col(column).first()).alias(name)
            for column, name in measures.items()
        ),
    ).unpivot(index="variant", variable_name="measure", value_name="ratio")
    return (
        alt.Chart(frame)
        .mark_bar()
        .encode(
            x=alt.X("ratio:Q", title=f"ratio to {comparison.baseline}"),
            y=alt.Y("variant:N", title=None, sort=list(comparison.variants)),
            row=alt.Row("measure:N", title=None, sort=list(measures.values()), spacing=14),
            color=_colour(comparison),
            tooltip=["variant:N", "measure:N", alt.Tooltip("ratio:Q", format=".3f")],
        )
        .properties(height=alt.Step(18), width=260)
    )


def save_chart(chart: Drawing, path: str | Path) -> Path:
    """Write a chart as .svg, .png or .pdf, without a browser."""
    path = Path(path)
    spec = _fixed_width(specification(chart) | {"config": theme()})
    match path.suffix.lower():
        case ".svg":
            content = vl_convert.vegalite_to_svg(spec).encode()
        case ".png":
            content = vl_convert.vegalite_to_png(spec, scale=2)
        case ".pdf":
            content = vl_convert.vegalite_to_pdf(spec)
        case other:
            raise WakefulError(f"charts are written as .svg, .png or .pdf, not {other!r}")
    with replaced(path) as temporary:
        temporary.write_bytes(content)
    return path


def specification(chart: Drawing) -> dict[str, Any]:
    """Return a chart as Vega-Lite with its data inside, however many rows they are."""
    with alt.data_transformers.enable("default", max_rows=None):
        return chart.to_dict()


def theme(*, dark: bool = False) -> dict[str, Any]:
    """Return the Vega-Lite configuration of all charts, for a light or a dark page."""
    ink, faint, grid = (
        ("#e8e6e3", "#a8a5a0", "#3a3a38") if dark else ("#1f1e1c", "#5c5a56", "#e4e2de")
    )
    axis = {
        "labelColor": faint, "titleColor": ink, "gridColor": grid, "domainColor": faint,
        "tickColor": faint, "labelFont": _FONT, "titleFont": _FONT, "titleFontWeight": 500,
        "labelFontSize": 12, "titleFontSize": 12,
    }  # fmt: skip
    return {
        "background": "transparent" if dark else "white",
        "font": _FONT,
        "view": {"stroke": None},
        "axis": axis,
        "rule": {"color": faint},
        "legend": {
            "labelColor": ink, "titleColor": ink, "orient": "top", "title": None,
            "labelFontSize": 13, "symbolStrokeWidth": 3, "symbolSize": 260, "columns": 4,
        },
        "header": {"labelColor": ink, "labelAnchor": "start", "labelFontWeight": 600,
                   "labelOrient": "top"},
    }  # fmt: skip


def _colour(comparison: Comparison, *, shown: Sequence[str] = ()) -> alt.Color:
    """Return the variants' colours, stable across charts, with a legend of those `shown`."""
    variants = list(comparison.variants)
    colours = [PALETTE[n % len(PALETTE)] for n in range(len(variants))]
    scale = alt.Scale(domain=variants, range=colours)
    legend = alt.Legend(values=list(shown)) if shown else None
    return alt.Color("variant:N", scale=scale, legend=legend)


def _dash(comparison: Comparison, *, shown: Sequence[str]) -> alt.StrokeDash:
    variants = list(comparison.variants)
    dashes = [_DASHES[n % len(_DASHES)] for n in range(len(variants))]
    scale = alt.Scale(domain=variants, range=dashes)
    return alt.StrokeDash("variant:N", scale=scale, legend=alt.Legend(values=list(shown)))


def _fixed_width(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "width": 640} if spec.get("width") == "container" else spec
