"""Charts as Vega-Lite: one specification serves the page and the paper's file."""

import copy
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import vl_convert
from altair.utils import schemapi

from wakeful.errors import WakefulError
from wakeful.runs.run import disk_errors, replace_atomically

Drawing = alt.Chart | alt.LayerChart | alt.FacetChart | alt.HConcatChart
Titled = Sequence[tuple[str, Drawing]]
"""Charts, each with a title that says what it shows where nothing stands around it."""

Tips = Sequence[str | alt.Tooltip]
"""Fields of a tooltip: plain, as "name:N" with their type, or formatted."""

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F")
"""Okabe and Ito's colors, distinguishable under color blindness; yellow gives way to violet and
gray, which show on white and on black."""
_PLAIN = str.maketrans({"‖": " ", "₀": "0", "|": " ", "β": "beta", "π": "pi", "'": "", "’": ""})
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [10, 2], [1, 3], [6, 2, 2, 2])
SHAPES = (
    "circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right",
    "triangle-left",
)  # fmt: skip
_NEAREST = "the point nearest to the pointer"
_PLACES = 100
"""Places of a line that the pointer finds, at least; more would be slow to draw."""
_TITLE = 8
"""Pixels that a letter of a title takes, margins included."""
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"

_UNDRAWABLE = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\u2028\u2029\ud800-\udfff\ufffe\uffff]")


def colors(names: Sized) -> list[str]:
    """Return a color for each name; past the palette's length they come again."""
    return [PALETTE[n % len(PALETTE)] for n in range(len(names))]


def encode_colors(field: str, names: Sequence[str], **more: Any) -> alt.Color:
    """Return the encoding of a field by the names' colors; `more` is as of `alt.Color`."""
    return encode_names(alt.Color, field, names, colors(names), **more)


def encode_names(
    channel: Any, field: str, names: Sequence[str], values: Sequence[Any], **more: Any
) -> Any:
    """Return the encoding of a field by a value for each name, such as a dash or a shape."""
    return channel(f"{field}:N", scale=alt.Scale(domain=list(names), range=list(values)), **more)


def shapes(names: Sized) -> list[str]:
    """Return a shape for each name; past their number they come again, with another color."""
    return [SHAPES[n % len(SHAPES)] for n in range(len(names))]


def marks(names: Sized) -> list[tuple[str, str]]:
    """Return each name's color and shape."""
    return [*zip(colors(names), shapes(names), strict=True)]


def dashes(names: Sized) -> list[list[int]]:
    """Return a dash for each name; past the palette's length, where colors come again, a color is
    combined with another dash.
    """
    return [DASHES[(n + n // len(PALETTE)) % len(DASHES)] for n in range(len(names))]


def tip(field: str, style: str, **more: Any) -> alt.Tooltip:
    """Return a number in a tooltip, formatted as d3 does by `style`."""
    return alt.Tooltip(f"{field}:Q", format=style, **more)


def tips(fields: Tips) -> list[alt.Tooltip]:
    """Return a tooltip's fields as channels: finding that out of a string takes Altair 5 ms."""
    return [alt.Tooltip(entry) if isinstance(entry, str) else entry for entry in fields]


unchecked = schemapi.debug_mode(False)
"""Checking every part as it is made is most of a page's time; tests check them all."""

HIDDEN = "hidden"
"""The parameter of a chart that lists the names which the reader has switched off."""
SHARE = (0.0, 1.0)
"""The scale of a share or a mass, in every chart of every model."""
WHOLE = "datum.value % 1 ? '' : datum.label"
"""Labels of an axis of layers: of two or three Vega has ticks between them, too."""
LAYERS = alt.X(
    "layer:Q", title="layer", scale=alt.Scale(nice=False, zero=False, padding=6),
    axis=alt.Axis(tickMinStep=1, format="d", labelExpr=WHOLE),
)  # fmt: skip
"""From the first layer, the embedding's −1 or 0, to the last."""
RANKS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]
"""Ticks of a logarithmic axis of ranks."""


def heatmap(
    frame: Any, x: alt.X, y: alt.Y, value: str, legend: alt.Legend, *, type: Any = alt.Undefined,
    domain: Any = alt.Undefined, tooltip: Tips = (),
) -> alt.Chart:  # fmt: skip
    """Draw the column `value` as the color of the cell at (x, y).

    `type` and `domain` are those of the color scale; by default it is linear over the range of the
    values. Values outside `domain` get the color of its end.
    """
    scale = alt.Scale(scheme="cividis", type=type, domain=domain, clamp=True)
    color = alt.Color(f"{value}:Q", scale=scale, legend=legend)
    return alt.Chart(frame).mark_rect().encode(x=x, y=y, color=color, tooltip=tips(tooltip))


def opacity(field: str, usual: float = 1.0) -> Any:
    """Return an opacity of `usual`, and of a twentieth of it for marks whose name in `field` the
    reader has switched off.
    """
    visible = {"test": f"indexof({HIDDEN}, datum.{field}) < 0", "value": usual}
    return alt.OpacityValue(usual / 20, condition=visible)


def switchable(*layers: alt.Chart) -> Drawing:
    """Layer charts whose lines the page's legend switches on and off (see `opacity`)."""
    # The first chart gets the parameter: of a layered chart Altair copies every layer four times.
    return alt.layer(layers[0].add_params(alt.param(name=HIDDEN, value=[])), *layers[1:])


def nearest_points(base: alt.Chart, tooltip: Tips, y: alt.Y) -> alt.Chart:
    """Return a layer of the points of `base` at `y`, with a tooltip: only the point nearest to the
    pointer is visible.
    """
    nearest = alt.selection_point(nearest=True, on="pointerover", clear="pointerout", empty=False)
    condition = {"param": nearest.name, "empty": False, "value": 1}
    points = base.mark_point(filled=True, size=70).properties(description=_NEAREST)
    points = points.encode(
        y=y, opacity=alt.OpacityValue(0, condition=condition), tooltip=tips(tooltip)
    )
    return points.add_params(nearest)


def draw_lines(
    frame: pl.DataFrame, by: str, names: Sequence[str], x: alt.X, y: alt.Y,
    tooltip: Tips, *, at: str = "layer", legend: alt.Legend | None = None,
    points: bool = False, detail: str = "", under: Sequence[alt.Chart] = (),
) -> Drawing:  # fmt: skip
    """Draw `y` over `x` as a line for each name in the column `by`, distinguished by color and
    dash; `points` also marks every value.

    `at` is the column that `x` shows; at a sample of its values the pointer finds a tooltip. A band
    spans the columns low and high where the frame has them. Without `legend` the page's own legend
    switches names on and off; with it a click on a name fades the others. Lines of one name with
    different values of `detail` are not connected. `under` is drawn first.
    """
    frame = round_digits(frame, 5)
    selection = alt.selection_point(fields=[by], bind="legend")
    visibility: Any = opacity(by)
    if legend is not None:
        visibility = alt.OpacityValue(0.12, condition={"param": selection.name, "value": 1})
    # Layers other than the lines have no legend, or it would stand beside the lines'.
    color_without_legend = encode_colors(by, names, legend=None)
    base = alt.Chart(frame).encode(x=x, color=color_without_legend)
    line = base.mark_line(strokeWidth=2).encode(
        y=y, color=encode_colors(by, names, legend=legend), opacity=visibility,
        strokeDash=encode_names(alt.StrokeDash, by, names, dashes(names), legend=legend),
    )  # fmt: skip
    line = line.encode(detail=alt.Detail(detail)) if detail else line
    layers: list[Any] = [*under]
    # No band where low and high are equal everywhere.
    if "low" in frame.columns and frame["high"].ne_missing(frame["low"]).any():
        area = alt.Chart(frame.drop_nulls(["low", "high"])).mark_area()
        band_opacity = opacity(by, 0.2) if legend is None else alt.value(0.18)
        layers.append(
            area.encode(
                x=x,
                y=alt.Y("low:Q"),
                y2=alt.Y2("high:Q"),
                color=color_without_legend,
                opacity=band_opacity,
            )
        )
    # Tooltips at a sample of the positions: more points would be slow to draw.
    positions = frame[at].unique().sort()
    sampled = positions.gather_every(max(1, len(positions) // _PLACES))
    tooltip_base = alt.Chart(frame.filter(pl.col(at).is_in(sampled.implode()))).encode(
        x=x, color=color_without_legend
    )
    layers += [
        line if legend is None else line.add_params(selection),
        nearest_points(tooltip_base, tooltip, y),
    ]
    if points:  # a layer of their own: with the lines' dashes the legend would draw dashed circles
        layers.append(base.mark_point(filled=True, size=30).encode(y=y, opacity=visibility))
    if legend is None:
        return switchable(*layers)
    return alt.layer(*layers).resolve_legend(color="independent", strokeDash="independent")


def scatter(
    frame: pl.DataFrame, by: str, names: Sequence[str], x: alt.X, y: alt.Y,
    tooltip: Tips, *, height: int,
) -> Drawing:  # fmt: skip
    """Draw a point at (x, y) for each row of `frame`, with the color and shape of its name in the
    column `by`, one of `names`. The page's legend switches names on and off.

    The chart takes the width of its container and is `height` pixels high.
    """
    base = alt.Chart(frame).encode(x=x, color=encode_colors(by, names, legend=None))
    shape = encode_names(alt.Shape, by, names, shapes(names), legend=None)
    points = base.mark_point(filled=True, size=26)
    points = points.encode(y=y, shape=shape, opacity=opacity(by, 0.7))
    return wide(switchable(points, nearest_points(base, tooltip, y)), height)


def draw_intervals(
    frame: pl.DataFrame, by: str, x: alt.X, color: alt.Color, *, order: Sequence[str],
    shape: Any = alt.Undefined, tooltip: Tips = (), row: int = 34,
    under: Sequence[alt.Chart] = (), over: Sequence[alt.Chart] = (),
) -> Drawing:  # fmt: skip
    """Draw each row of `frame` at the height of its name in the column `by`, the names in `order`:
    a point at `x`, and a bar from the column low to the column high where these are not null.

    A row has `row` pixels of height. `under` is drawn first; `over` is drawn last, each of its
    marks at the height of its name.
    """
    y = alt.Y(f"{by}:N", title=None, sort=list(order))
    base = alt.Chart(round_digits(frame)).encode(y=y, color=color)
    points = base.mark_point(filled=True, size=90, opacity=1)
    points = points.encode(x=x, shape=shape, tooltip=tips([f"{by}:N", *tooltip]))
    bars = alt.Chart(round_digits(frame.drop_nulls(["low", "high"]))).encode(y=y, color=color)
    bars = bars.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q"), x2=alt.X2("high:Q"))
    chart = alt.layer(*under, bars, points, *(overlay.encode(y=y) for overlay in over))
    return chart.properties(height=row * len(frame), width="container")


def line_at(axis: str, value: float, name: str, **more: Any) -> alt.Chart:
    """Draw a faint line across the chart at a value of the axis "x" or "y"; `name` is the column
    of its data.
    """
    rule = alt.Chart(pl.DataFrame({name: [value]})).mark_rule(opacity=0.6)
    return rule.encode(**{axis: f"{name}:Q"}, **more)


def round_digits(frame: pl.DataFrame, digits: int = 6) -> pl.DataFrame:
    """Return the frame with that many significant digits, all that a chart shows."""
    return frame.with_columns(pl.selectors.float().round_sig_figs(digits))


def wide(chart: Drawing, height: int) -> Drawing:
    """Change a chart to take the width of its container, axes and legends included, and return it.

    `height` is in pixels. (In a chart of this width Vega-Lite drops a height per row, `step`, with
    a warning on the console.)
    """
    autosize = alt.AutoSizeParams(type="fit-x", contains="padding")
    # Set in place: `properties` would copy the chart with its data.
    chart.width, chart.height, chart.autosize = "container", height, autosize
    return chart


def save_chart(chart: Drawing, path: str | Path, title: str = "") -> Path:
    """Write a chart, under a title, as .svg, .png or .pdf, and return the path; no browser is
    needed.

    Raises:
        WakefulError: the path has another suffix, or the file cannot be written.
    """
    path = Path(path)
    spec = standalone_spec(specification(chart), title=title)
    suffix = path.suffix.lower()
    if suffix not in _WRITERS:
        raise WakefulError(f"charts are written as .svg, .png or .pdf, not {suffix!r}")
    content = _WRITERS[suffix](spec)
    with replace_atomically(path) as temporary:
        temporary.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


_WRITERS: Mapping[str, Callable[[dict[str, Any]], str | bytes]] = {
    ".svg": vl_convert.vegalite_to_svg,
    ".png": partial(vl_convert.vegalite_to_png, scale=2),
    ".pdf": vl_convert.vegalite_to_pdf,
}


def save_figures(charts: Titled, folder: str | Path, formats: Sequence[str]) -> None:
    """Write charts into a folder, each named after its title, one file per format."""
    folder = Path(folder)
    if formats:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    names: set[str] = set()
    for title, chart in charts:
        name = slug(title)
        if name in names:  # titles may differ only in signs that a slug leaves out
            name = f"{name}-{len(names)}"
        names.add(name)
        for suffix in formats:
            save_chart(chart, folder / f"{name}.{suffix}", title=title)


def slug(title: str) -> str:
    """Return a title as a file's name: what leaves no trouble in a paper's source."""
    return re.sub("[^a-z0-9]+", "-", title.translate(_PLAIN).lower()).strip("-")


def standalone_spec(spec: dict[str, Any], width: int = 640, title: str = "") -> dict[str, Any]:
    """Return the specification of a chart as a picture outside a page.

    It gets the title `title`, and the legends that a page draws for all of its charts. The first
    choice of its drop-down list becomes the subtitle, or the title if there is none. `width`, in
    pixels, is for a chart that fills the width of a page. What only a pointer shows is left out.
    """
    spec = add_legends(spec) | {"config": theme()}
    choice = _first_choice(spec)
    if title or choice:
        lines = textwrap.wrap(drawable(title) or choice, width // _TITLE)
        spec["title"] = {"text": lines, "subtitle": choice if title else ""}
    if "layer" in spec:  # without the points that follow the pointer, and their parameters
        spec["layer"] = [layer for layer in spec["layer"] if layer.get("description") != _NEAREST]
    if "params" in spec:
        # Such a parameter has select = {"nearest": true, ...}.
        spec["params"] = [p for p in spec["params"] if "nearest" not in p.get("select", ())]
    if spec.get("width") == "container":
        spec["width"] = width
    return spec


def legends(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of the legends that a page draws once for all of its charts, by field.

    If the chart's names can be switched on and off, there is one for each field that is drawn as
    dashes or shapes, has several names, and whose own legend is off. Otherwise there is none.
    """
    parameter_names = [parameter["name"] for parameter in spec.get("params", ())]
    if HIDDEN not in parameter_names:  # no names can be switched off
        return {}
    options: dict[str, dict[str, Any]] = {}
    for channel, symbol in (("strokeDash", {"symbolType": "stroke"}), ("shape", {})):
        for encoding in _encodings(spec):
            if channel not in encoding:
                continue
            scaled = encoding[channel]
            if "legend" not in scaled or scaled["legend"] is not None:  # drawn, unless it is null
                continue
            if len(scaled["scale"]["domain"]) > 1:
                # Opaque: otherwise a symbol has the opacity of the line's band.
                options[scaled["field"]] = symbol | {"symbolOpacity": 1}
    return options


def _encodings(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [layer.get("encoding", {}) for layer in spec.get("layer", [spec])]


def add_legends(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a specification to which the legends are added that a page would draw for it
    (`legends`); the specification itself if there are none.
    """
    options_by_field = legends(spec)
    if not options_by_field:
        return spec
    # Only the two parts that change are copied, without the chart's data.
    spec = spec | {key: copy.deepcopy(spec[key]) for key in ("layer", "encoding") if key in spec}
    for encoding in _encodings(spec):
        for channel in encoding.keys() & {"color", "shape", "strokeDash"}:
            field = encoding[channel].get("field")
            if field in options_by_field:
                encoding[channel]["legend"] = options_by_field[field]
    return spec


def _first_choice(spec: dict[str, Any]) -> str:
    """Return the label of the choice with which a chart's drop-down list starts; "" for no list."""
    for parameter in spec.get("params", ()):
        if "labels" in parameter.get("bind", ()):
            return parameter["bind"]["labels"][parameter["value"]]
    return ""


def specification(chart: Drawing) -> dict[str, Any]:
    """Return a chart as a Vega-Lite specification with all of its data.

    JSON has no NaN and no infinity: they become null. Characters that cannot be drawn are replaced
    (`drawable`).
    """
    with alt.data_transformers.enable("default", max_rows=None):
        return _drawable_values(chart.to_dict(validate=schemapi.DEBUG_MODE))


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
            "labelFontSize": 13, "symbolStrokeWidth": 3, "symbolSize": 260, "columns": 2,
            "labelLimit": 300, "titleLimit": 300,
        },
        "text": {"color": ink, "font": _FONT, "fontSize": 12},
        "title": {"color": ink, "font": _FONT, "fontSize": 13, "fontWeight": 500,
                  "anchor": "start", "frame": "group", "subtitleColor": faint,
                  "subtitleFont": _FONT, "subtitleFontSize": 12},
        "header": {"labelColor": ink, "labelAnchor": "start", "labelFontWeight": 600,
                   "labelOrient": "top"},
    }  # fmt: skip


def drawable(text: str) -> str:
    """Return a name that charts can draw, whatever a user chose.

    Characters that XML forbids end vl-convert's process. Vega cannot draw U+2028 and U+2029.
    """

    def replacement(match: re.Match[str]) -> str:
        """Return the visible symbol of a control character, or U+FFFD for another character."""
        character = match[0]
        return chr(0x2400 + ord(character)) if character < " " else "\ufffd"

    return _UNDRAWABLE.sub(replacement, text)


def _drawable_values(value: Any) -> Any:
    """Return a copy of nested dicts and lists in which texts are `drawable`, and numbers that are
    not finite are None.
    """
    if isinstance(value, dict):
        return {key: _drawable_values(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_drawable_values(entry) for entry in value]
    if isinstance(value, str):
        return drawable(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
