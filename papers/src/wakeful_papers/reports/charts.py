"""Charts of exhibits: losses, layers, positions, groups, bars, attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import polars as pl

from wakeful.estimates import mean_and_error
from wakeful.probes.base import Frame
from wakeful.reports.charts import (
    PALETTE,
    RANKS,
    Drawing,
    Titled,
    draw_intervals,
    draw_lines,
    encode_colors,
    line_at,
    round_digits,
    tip,
)
from wakeful.reports.terms import explain
from wakeful.variants import build_call
from wakeful_papers.exhibits.derived import Results, RowRun, relative_train_loss, row_figure
from wakeful_papers.exhibits.exhibit import Exhibit
from wakeful_papers.exhibits.figures import Curve, Measurement
from wakeful_papers.reports import pictures

_PRINTED = "in the paper"
_MAX_POINTS = 400
_RANKS = {"rank", "mass_columns"}


def published_row(exhibit: Exhibit, group: str, row: str) -> str:
    """Return the name of a row in the published cells: GROUP.ROW if they are by group."""
    full = f"{group}.{row}"
    return full if any(key == full for key, _ in exhibit.table.cells) else row


def figure_values(results: Results, group: str, row: str, figure: str) -> list[float]:
    """Return a row's figure for every seed that measured it."""
    values = (row_figure(results, group, row, seed, figure) for seed in results.seeds)
    return [value for value in values if value is not None]


def draw_exhibit(exhibit: Exhibit, results: Results) -> list[tuple[str, str, Drawing]]:
    """Return the charts as (title, a line that explains the chart, drawing)."""
    data = ChartData(exhibit, results)
    return [
        (title, "; ".join(filter(None, (explain(expression), _description(drawing)))), drawing)
        for expression in exhibit.draw
        for title, drawing in build_call("draw", DRAWINGS, expression)(data)
    ]


def _description(drawing: Drawing) -> str:
    """Return a drawing's own description, or an empty text."""
    return drawing.description if isinstance(drawing.description, str) else ""


@dataclass(frozen=True)
class ChartData:
    """An exhibit's results, with the labels and colors of its rows."""

    exhibit: Exhibit
    results: Results

    def label(self, row: str) -> str:
        return self.exhibit.table.labels.get(row, row)

    def group(self, group: str) -> str:
        return self.exhibit.groups[group].label if group in self.exhibit.groups else group

    @property
    def labels(self) -> list[str]:
        return [self.label(row) for row in self.results.rows]

    def color(self) -> alt.Color:
        return encode_colors("row", self.labels, legend=None)

    def draw_lines(
        self, frame: pl.DataFrame, x: alt.X, y: alt.Y, *, height: int, **more: Any
    ) -> Drawing:
        """Draw one line per row over the column x, with a legend."""
        tooltip = ["row:N", "x:Q", tip("value", ".4f")]
        chart = draw_lines(
            frame, "row", self.labels, x, y, tooltip, at="x", legend=alt.Legend(), **more
        )
        return chart.properties(height=height, width="container")


def _chart_per_group(data: ChartData, title: str, draw: Callable[[str], Drawing | None]) -> Titled:
    """Draw a chart for each group that has something to draw."""
    drawings = ((data.group(group), draw(group)) for group in data.results.groups)
    return [
        (" ".join(filter(None, (label, title))), drawing)
        for label, drawing in drawings
        if drawing is not None
    ]


def relative_loss(data: ChartData) -> Titled:
    """Draw the smoothed training loss minus the baseline's over steps, one chart per group."""
    title = f"training loss minus {data.label(data.results.baseline)} (nats)"
    return _draw_curves(data, relative_train_loss, "step", title, zero=True)


def losses(data: ChartData, *, curve: str = "validation_loss") -> Titled:
    """Draw a loss over steps, one chart per group."""
    title = curve.replace("_", " ") + " (nats per token)"
    return _draw_curves(data, lambda run: run.curve(curve), "step", title)


def over_layers(
    data: ChartData, *, metric: str, variant: str = "paper", position: str = "all", title: str = ""
) -> Titled:
    """Draw a metric over layers, one chart per group."""
    name = f"{metric}/{variant}/{position}"
    title = title or metric.replace("_", " ")
    ranks = metric.partition("@")[0] in _RANKS
    return _draw_curves(data, lambda run: run.curve(name), "layer", title, ranks=ranks)


def over_positions(data: ChartData, *, metric: str, title: str = "", start: int = 0) -> Titled:
    """Draw a metric's mean over layers over positions, up to the first that was not measured.

    Positions are drawn from 1; in the metric's own names they begin with `start`.
    """

    def curve(run: RowRun) -> Curve | None:
        means: list[float] = []
        while (by_layer := run.curve(f"{metric}/paper/{len(means) + start}")) is not None:
            means.append(float(by_layer[1].mean()))
        return (np.arange(1.0, len(means) + 1), np.array(means)) if means else None

    return _draw_curves(data, curve, "position", title or metric.replace("_", " "))


def over_groups(
    data: ChartData, *, figure: str = "loss", title: str = "", axis: str = "", log: bool = False,
    fit: Sequence[str] = (),
) -> Titled:  # fmt: skip
    """Draw a figure over the groups' axis values, such as length or size, ± one standard error.

    Axis values are the paper's own numbers at every scale, with the title `axis`: "tokens per
    sequence, in the paper". For each row a straight line over the axis value's logarithm is fitted
    through the groups of `fit`.
    """
    results = data.results
    rows = [
        {"row": data.label(row), "x": x, **_band(values)}
        for group, x in results.axis_values.items()
        for row in results.rows
        if (values := figure_values(results, group, row, figure))
    ]
    if not rows:
        return []
    scale = alt.Scale(type="log") if log else alt.Scale(zero=False)
    x = alt.X("x:Q", title=axis or None, scale=alt.Scale(type="log"))
    y = alt.Y("value:Q", title=title or figure, scale=scale)
    frame = round_digits(pl.DataFrame(rows))
    color = data.color()
    rules = alt.Chart(frame).mark_rule()
    under = [rules.encode(x=x, color=color, y=alt.Y("low:Q"), y2=alt.Y2("high:Q"))]
    if fit:
        axis_values = [results.axis_values[group] for group in fit]
        fitted = alt.Chart(frame.filter(pl.col("x").is_in(axis_values)))
        fitted = fitted.transform_regression("x", "value", method="log", groupby=["row"])
        fitted = fitted.mark_line(strokeWidth=1, strokeDash=[2, 3])
        under.append(fitted.encode(x=x, y=y, color=color))
    chart = data.draw_lines(frame.drop("low", "high"), x, y, height=280, points=True, under=under)
    return [(title or figure, chart)]


def bars(data: ChartData, *, figure: str = "loss", title: str = "", against: bool = True) -> Titled:
    """Draw a figure of each row, with `against` minus the baseline's, ± one standard error.

    Values that the paper prints are open diamonds, with a legend.
    """
    results, base = data.results, data.results.baseline
    axis = title or figure
    axis = f"{axis} minus {data.label(base)}" if against else axis

    def draw(group: str) -> Drawing | None:
        rows = []
        for row in results.rows:
            values = (_differences if against else figure_values)(results, group, row, figure)
            if not values or (against and row == base):
                continue
            rows.append({"row": data.label(row), **_band(values),
                         "paper": _published(data, group, row, figure, against)})  # fmt: skip
        if not rows:
            return None
        frame = round_digits(pl.DataFrame(rows, schema_overrides={"paper": pl.Float64}))
        x = alt.X("value:Q", title=axis, scale=alt.Scale(zero=against), axis=alt.Axis(tickCount=8))
        under = [line_at("x", 0.0, "zero")] if against else []
        over: list[alt.Chart] = []
        extra: dict[str, str] = {}
        if frame["paper"].drop_nulls().len():
            scale = alt.Scale(domain=[_PRINTED], range=["diamond"])
            over.append(
                alt.Chart(frame)
                .transform_filter("datum.paper !== null")
                .transform_calculate(printed=f"'{_PRINTED}'")
                .mark_point(filled=False, size=110, color=PALETTE[-1])
                .encode(x=alt.X("paper:Q"), shape=alt.Shape("printed:N", scale=scale))
            )
            extra["description"] = "points are means over seeds here, open diamonds are the paper's"
        tooltip = [tip("value", "+.4f"), tip("paper", "+.4f")]
        return draw_intervals(
            frame, "row", x, data.color(), order=data.labels, tooltip=tooltip, under=under,
            over=over,
        ).properties(**extra)  # fmt: skip

    return _chart_per_group(data, axis, draw)


def mean_attention(data: ChartData) -> Titled:
    """Draw each row's mean attention over heads and layers among the first positions."""
    title = "mean attention of all heads and layers"
    return _draw_pictures(
        data, "mean_attention", title, lambda frames, _: pictures.mean_attention(frames)
    )


def hidden_magnitude(data: ChartData) -> Titled:
    """Draw each row's mean |x| over layers of the first positions, by channel."""
    title = "magnitude of hidden states, mean over layers"
    return _draw_pictures(
        data, "hidden_picture", title, lambda frames, _: pictures.hidden_states(frames)
    )


def attention_of_layers(
    data: ChartData, *, at: Sequence[float] = (), by_rank: bool = False
) -> Titled:
    """Draw some layers' attention, the mean over their heads, of the first seed's models: layers at
    the shares `at` of the depth, or with `by_rank` those of the highest and the lowest rank.
    """

    def choose_layers(measurement: Measurement, rows: Frame) -> Sequence[int]:
        depth = int(rows["layer"].max()) + 1  # pyright: ignore[reportArgumentType]
        if by_rank:
            layers, ranks = measurement.curves["rank/paper/all"]
            return [int(layers[ranks.argmax()]), int(layers[ranks.argmin()])]
        return list(dict.fromkeys(max(1, round(share * depth)) for share in at))

    def draw(frames: pictures.Labeled, measurements: Sequence[Measurement]) -> Drawing | None:
        squares, num_columns = [], 0
        for (label, rows), measurement in zip(frames, measurements, strict=True):
            cells = pictures.parse_cells(rows, "row", "column", "layer")
            mean = cells.group_by("layer", "row", "column", maintain_order=True).agg(
                pl.col("value").mean()
            )
            layers = choose_layers(measurement, rows)
            num_columns = max(num_columns, len(layers))
            squares += [(f"{label}, layer {n}", mean.filter(layer=n - 1)) for n in layers]
        return pictures.squares(squares, num_columns)

    return _draw_pictures(data, "attention_picture", "attention, mean over a layer’s heads", draw)


def _draw_pictures(
    data: ChartData, metric: str, title: str,
    draw: Callable[[pictures.Labeled, Sequence[Measurement]], Drawing | None],
) -> Titled:  # fmt: skip
    """Draw pictures of the first seed's models, one drawing per group."""
    results = data.results

    def draw_group(group: str) -> Drawing | None:
        measurements = {
            row: measurement
            for row in results.rows
            if (measurement := results.measurements.get((group, row, results.seeds[0])))
            and metric in measurement.pictures
        }
        frames = [(data.label(row), m.pictures[metric]) for row, m in measurements.items()]
        return draw(frames, [*measurements.values()]) if frames else None

    return _chart_per_group(data, f"{title} (seed {results.seeds[0]})", draw_group)


_DRAW_FUNCTIONS: tuple[Callable[..., Titled], ...] = (
    relative_loss, losses, over_layers, over_positions, over_groups, bars, mean_attention,
    hidden_magnitude, attention_of_layers,
)  # fmt: skip
DRAWINGS = {draw.__name__: draw for draw in _DRAW_FUNCTIONS}
"""Chart functions by the name that exhibits use."""


def _draw_curves(
    data: ChartData, curve: Callable[[RowRun], Curve | None], x: str, title: str, *,
    zero: bool = False, ranks: bool = False,
) -> Titled:  # fmt: skip
    """Draw a curve for each row, the mean over seeds ± one standard error, one chart per group.

    Ranks have a logarithmic axis, as in a diagnosis; their bands end at 1.
    """
    results = data.results

    def draw(group: str) -> Drawing | None:
        frames = []
        for row in results.rows:
            curves = [
                points
                for seed in results.seeds
                if (group, row, seed) in results.measurements
                and (points := curve(RowRun(results, group, row, seed))) is not None
                and len(points[0])
            ]
            if curves:
                frames.append(_mean_curve(curves).with_columns(row=pl.lit(data.label(row))))
        if not frames:
            return None
        frame = round_digits(pl.concat(frames))
        axis = alt.X("x:Q", title=x, axis=alt.Axis(tickMinStep=1, tickCount=8))
        y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=False))
        if ranks:
            frame = frame.with_columns(pl.col("value", "low", "high").clip(1.0))
            top = max(2.0, *frame["value"], *frame["high"].drop_nulls())
            y = alt.Y("value:Q", title=title,
                      scale=alt.Scale(type="log", domain=(1, top), nice=False),
                      axis=alt.Axis(values=[rank for rank in RANKS if rank <= top]))  # fmt: skip
        under = [line_at("y", 0.0, "zero")] if zero else []
        return data.draw_lines(frame, axis, y, height=300, points=x == "layer", under=under)

    return _chart_per_group(data, title, draw)


def _mean_curve(curves: Sequence[Curve]) -> pl.DataFrame:
    """Return the mean over seeds ± one standard error at x values of all, up to `_MAX_POINTS`."""
    shared = curves[0][0]
    for steps, _ in curves[1:]:
        shared = np.intersect1d(shared, steps)
    stride = max(1, -(-len(shared) // _MAX_POINTS))
    shared = shared[(len(shared) - 1) % stride :: stride]
    values = np.array([y[np.searchsorted(x, shared)] for x, y in curves])
    return pl.DataFrame(
        [{"x": x, **_band(list(y))} for x, y in zip(shared, values.T, strict=True)],
        schema=dict.fromkeys(("x", "value", "low", "high"), pl.Float64),
    )


def _band(values: list[float]) -> dict[str, float | None]:
    mean, error = mean_and_error(values)
    several = len(values) > 1
    return {
        "value": mean,
        "low": mean - error if several else None,
        "high": mean + error if several else None,
    }


def _differences(results: Results, group: str, row: str, figure: str) -> list[float]:
    pairs = (
        (row_figure(results, group, row, seed, figure),
         row_figure(results, group, results.baseline, seed, figure))
        for seed in results.seeds
    )  # fmt: skip
    return [value - base for value, base in pairs if value is not None and base is not None]


def _published(data: ChartData, group: str, row: str, figure: str, against: bool) -> float | None:
    cells, base = data.exhibit.table.cells, data.results.baseline
    value = cells.get((published_row(data.exhibit, group, row), figure))
    base_value = cells.get((published_row(data.exhibit, group, base), figure)) if against else 0.0
    if isinstance(value, int | float) and isinstance(base_value, int | float):
        return float(value - base_value)
    return None
