"""Charts as Vega-Lite: one specification serves the page and the paper's file."""

import math
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import vl_convert

from wakeful.errors import WakefulError
from wakeful.runs.run import replaced

Drawing = alt.Chart | alt.LayerChart | alt.FacetChart | alt.HConcatChart

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F")
"""Okabe and Ito's colors, distinguishable under color blindness; yellow gives way to violet and
gray, which show on white and on black."""
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [10, 2], [1, 3], [6, 2, 2, 2])
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def colors(names: Sized) -> list[str]:
    """Return a color for each name; past the palette's length they come again."""
    return [PALETTE[n % len(PALETTE)] for n in range(len(names))]


def colored(field: str, names: Sequence[str], **more: Any) -> alt.Color:
    """Return the encoding of a field by the names' colors; `more` is as of `alt.Color`."""
    scale = alt.Scale(domain=list(names), range=colors(names))
    return alt.Color(f"{field}:N", scale=scale, **more)


def dashed(field: str, names: Sequence[str], dashes: Sequence[list[int]], **more: Any) -> Any:
    """Return the encoding of a field by a dash for each name."""
    scale = alt.Scale(domain=list(names), range=list(dashes))
    return alt.StrokeDash(f"{field}:N", scale=scale, **more)


def tip(field: str, style: str, **more: Any) -> alt.Tooltip:
    """Return a number in a tooltip, formatted as d3 does by `style`."""
    return alt.Tooltip(f"{field}:Q", format=style, **more)


def heatmap(
    frame: pl.DataFrame, x: alt.X, y: alt.Y, value: str, legend: Any, *, type: Any = alt.Undefined,
    tooltip: Any = alt.Undefined,
) -> alt.Chart:  # fmt: skip
    """Draw a column as a cell's color at each place; the legend is a title, `alt.Legend` or None.

    `type` is the scale's, linear where it is not given.
    """
    legend = alt.Legend(title=legend) if isinstance(legend, str) else legend
    scale = alt.Scale(scheme="cividis", type=type)
    color = alt.Color(f"{value}:Q", scale=scale, legend=legend)
    return alt.Chart(frame).mark_rect().encode(x=x, y=y, color=color, tooltip=tooltip)


def line_at(axis: str, value: float, name: str, **more: Any) -> alt.Chart:
    """Draw a faint line at a value, which has a name, of the axis "x" or "y"."""
    rule = alt.Chart(pl.DataFrame({name: [value]})).mark_rule(opacity=0.6)
    return rule.encode(**{axis: f"{name}:Q"}, **more)


def rounded(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the frame with six significant digits, all that a chart shows."""
    return frame.with_columns(pl.selectors.float().round_sig_figs(6))


def wide(chart: Drawing, height: int | alt.Step) -> Drawing:
    """Return a chart that takes the width of its place, axes and legends included."""
    autosize = alt.AutoSizeParams(type="fit-x", contains="padding")
    return chart.properties(width="container", height=height, autosize=autosize)


def save_chart(chart: Drawing, path: str | Path) -> Path:
    """Write a chart as .html, .svg, .png or .pdf, without a browser.

    The HTML is one file that loads nothing: the libraries that draw are inside.
    """
    path = Path(path)
    spec = fixed(chart)
    match path.suffix.lower():
        case ".svg":
            content = vl_convert.vegalite_to_svg(spec).encode()
        case ".png":
            content = vl_convert.vegalite_to_png(spec, scale=2)
        case ".pdf":
            content = vl_convert.vegalite_to_pdf(spec)
        case ".html":
            content = vl_convert.vegalite_to_html(spec, bundle=True).encode()
        case other:
            raise WakefulError(f"charts are written as .html, .svg, .png or .pdf, not {other!r}")
    with replaced(path) as temporary:
        temporary.write_bytes(content)
    return path


def fixed(chart: Drawing) -> dict[str, Any]:
    """Return a chart as Vega-Lite with a width and colors of its own, to stand outside a page."""
    spec = specification(chart) | {"config": theme()}
    return spec | {"width": 640} if spec.get("width") == "container" else spec


def specification(chart: Drawing) -> dict[str, Any]:
    """Return a chart as Vega-Lite with its data inside, however many rows they are.

    JSON knows no NaN and no infinity: a value that is neither number nor text is null.
    """
    with alt.data_transformers.enable("default", max_rows=None):
        return _finite(chart.to_dict())


def theme(*, dark: bool = False) -> dict[str, Any]:
    """Return the Vega-Lite configuration of all charts, for a light or a dark page."""
    ink, faint, grid = (
        ("#e8e6e3", "#a8a5a0", "#3a3a38") if dark else ("#1f1e1c", "#5c5a56", "#e4e2de")
    )
    axis = {
        "labelColor": faint, "titleColor": ink, "gridColor": grid, "domainColor": faint,
        "tickColor": faint, "labelFont": _FONT, "titleFont": _FONT, "titleFontWeight": 500,
        "labelFontSize": 12, "titleFontSize": 12, "labelLimit": 230,
        "labelFlush": False,
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
            "labelLimit": 300,
        },
        "text": {"color": ink, "font": _FONT, "fontSize": 12},
        "title": {"color": ink, "font": _FONT, "fontSize": 13, "fontWeight": 500,
                  "anchor": "start", "frame": "group"},
        "header": {"labelColor": ink, "labelAnchor": "start", "labelFontWeight": 600,
                   "labelOrient": "top"},
    }  # fmt: skip


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
