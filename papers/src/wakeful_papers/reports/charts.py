"""What exhibits are drawn as: losses, layers, positions, groups, bars, attention."""

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
from wakeful_papers.exhibits.derived import At, Results, figure_of, relative
from wakeful_papers.exhibits.exhibit import Exhibit
from wakeful_papers.exhibits.figures import Curve, SeenRow
from wakeful_papers.reports import pictures

_PRINTED = "in the paper"
_MOST_POINTS = 400
_RANKS = {"rank", "mass_columns"}


def named(exhibit: Exhibit, group: str, row: str) -> str:
    """Return what the published cells of a row are called: GROUP.ROW where there are groups."""
    full = f"{group}.{row}"
    return full if any(key == full for key, _ in exhibit.table.cells) else row


def values_of(results: Results, group: str, row: str, figure: str) -> list[float]:
    """Return a row's figure of every seed that has one."""
    found = (figure_of(results, group, row, seed, figure) for seed in results.seeds)
    return [value for value in found if value is not None]


def drawn(exhibit: Exhibit, results: Results) -> list[tuple[str, str, Drawing]]:
    """Return the charts, each with its title and a line that explains what it draws."""
    names = Names(exhibit, results)
    return [
        (title, "; ".join(filter(None, (explain(expression), _described(drawing)))), drawing)
        for expression in exhibit.draw
        for title, drawing in build_call("draw", DRAWINGS, expression)(names)
    ]


def _described(drawing: Drawing) -> str:
    """Return what a drawing says of itself."""
    return drawing.description if isinstance(drawing.description, str) else ""


@dataclass(frozen=True)
class Names:
    """An exhibit's results with the words and colors of its rows."""

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
        """Draw a line a row over the column x, with a legend."""
        tooltip = ["row:N", "x:Q", tip("value", ".4f")]
        chart = draw_lines(
            frame, "row", self.labels, x, y, tooltip, at="x", legend=alt.Legend(), **more
        )
        return chart.properties(height=height, width="container")


def _each_group(names: Names, title: str, draw: Callable[[str], Drawing | None]) -> Titled:
    """Draw a chart a group, of those that have something to draw."""
    drawings = ((names.group(group), draw(group)) for group in names.results.groups)
    return [
        (" ".join(filter(None, (label, title))), drawing)
        for label, drawing in drawings
        if drawing is not None
    ]


def relative_loss(names: Names) -> Titled:
    """Draw the smoothed training loss minus the baseline's over steps, a chart a group."""
    base = names.results.baseline
    return _curves(
        names, relative, "step", f"training loss minus {names.label(base)} (nats)", zero=True,
    )  # fmt: skip


def losses(names: Names, *, curve: str = "validation_loss") -> Titled:
    """Draw a loss over steps, a chart a group."""
    title = curve.replace("_", " ") + " (nats per token)"
    return _curves(names, lambda at: at.curve(curve), "step", title)


def over_layers(
    names: Names, *, metric: str, variant: str = "paper", position: str = "all", title: str = ""
) -> Titled:
    """Draw a metric over the layers of the trained models."""
    name = f"{metric}/{variant}/{position}"
    title = title or metric.replace("_", " ")
    ranks = metric.partition("@")[0] in _RANKS
    return _curves(names, lambda at: at.curve(name), "layer", title, ranks=ranks)


def over_positions(names: Names, *, metric: str, title: str = "", start: int = 0) -> Titled:
    """Draw a metric over positions from 1, the mean over the layers of the trained models.

    The metric numbers them from `start`.
    """

    def curve(at: At) -> Curve | None:
        places: list[int] = []
        means: list[float] = []
        while (found := at.curve(f"{metric}/paper/{len(places) + start}")) is not None:
            places.append(len(places) + 1)
            means.append(float(found[1].mean()))
        return (np.array(places, dtype=np.float64), np.array(means)) if places else None

    return _curves(names, curve, "position", title or metric.replace("_", " "))


def over_groups(
    names: Names, *, figure: str = "loss", title: str = "", axis: str = "", log: bool = False,
    fit: Sequence[str] = (),
) -> Titled:  # fmt: skip
    """Draw a figure over the place of the groups, such as length or size, ± one standard error.

    Places are the paper's own numbers at every scale, and `axis` says of what: "tokens per
    sequence, in the paper". With the straight line of each row over the logarithm of the place,
    through the groups of `fit`.
    """
    results = names.results
    rows = [
        {"row": names.label(row), "x": place, **_spread(values)}
        for group, place in results.places.items()
        for row in results.rows
        if (values := values_of(results, group, row, figure))
    ]
    if not rows:
        return []
    scale = alt.Scale(type="log") if log else alt.Scale(zero=False)
    x = alt.X("x:Q", title=axis or None, scale=alt.Scale(type="log"))
    y = alt.Y("value:Q", title=title or figure, scale=scale)
    frame = round_digits(pl.DataFrame(rows))
    bare = names.color()
    bars = (
        alt.Chart(frame).mark_rule().encode(x=x, color=bare, y=alt.Y("low:Q"), y2=alt.Y2("high:Q"))
    )
    under = [bars]
    if fit:
        places = [results.places[group] for group in fit]
        fitted = alt.Chart(frame.filter(pl.col("x").is_in(places)))
        fitted = fitted.transform_regression("x", "value", method="log", groupby=["row"])
        fitted = fitted.mark_line(strokeWidth=1, strokeDash=[2, 3])
        under.append(fitted.encode(x=x, y=y, color=bare))
    chart = names.draw_lines(frame.drop("low", "high"), x, y, height=280, points=True, under=under)
    return [(title or figure, chart)]


def bars(names: Names, *, figure: str = "loss", title: str = "", against: bool = True) -> Titled:
    """Draw a figure of each row ± one standard error, paired differences to the baseline's.

    The paper's own stand beside them as open diamonds, where it prints them, with a legend.
    """
    results, base = names.results, names.results.baseline
    axis = title or figure
    axis = f"{axis} minus {names.label(base)}" if against else axis

    def draw(group: str) -> Drawing | None:
        rows = []
        for row in results.rows:
            values = (_paired if against else values_of)(results, group, row, figure)
            if not values or (against and row == base):
                continue
            rows.append({"row": names.label(row), **_spread(values),
                         "paper": _printed(names, group, row, figure, against)})  # fmt: skip
        if not rows:
            return None
        frame = round_digits(pl.DataFrame(rows, schema_overrides={"paper": pl.Float64}))
        x = alt.X("value:Q", title=axis, scale=alt.Scale(zero=against), axis=alt.Axis(tickCount=8))
        under = [line_at("x", 0.0, "zero")] if against else []
        over: list[alt.Chart] = []
        told: dict[str, str] = {}
        if frame["paper"].drop_nulls().len():
            scale = alt.Scale(domain=[_PRINTED], range=["diamond"])
            over.append(
                alt.Chart(frame)
                .transform_filter("datum.paper !== null")
                .transform_calculate(printed=f"'{_PRINTED}'")
                .mark_point(filled=False, size=110, color=PALETTE[-1])
                .encode(x=alt.X("paper:Q"), shape=alt.Shape("printed:N", scale=scale))
            )
            told["description"] = "points are means over seeds here, open diamonds are the paper's"
        tooltip = [tip("value", "+.4f"), tip("paper", "+.4f")]
        return draw_intervals(
            frame, "row", x, names.color(), order=names.labels, tooltip=tooltip, under=under,
            over=over,
        ).properties(**told)  # fmt: skip

    return _each_group(names, axis, draw)


def mean_attention(names: Names) -> Titled:
    """Draw the mean attention of all heads and layers among the first positions, a row beside
    the other.
    """
    title = "mean attention of all heads and layers"
    return _pictured(
        names, "mean_attention", title, lambda display, _: pictures.mean_attention(display)
    )


def hidden_magnitude(names: Names) -> Titled:
    """Draw the mean |x| of the first positions by channel over layers, a row beside the other."""
    title = "magnitude of hidden states, mean over layers"
    return _pictured(
        names, "hidden_picture", title, lambda display, _: pictures.hidden_states(display)
    )


def attention_of_layers(names: Names, *, at: Sequence[float] = (), by_rank: bool = False) -> Titled:
    """Draw the attention of some layers, the mean over their heads: those at shares of the depth,
    or with `by_rank` the one of the highest rank and the one of the lowest.
    """

    def chosen(seen: SeenRow, rows: Frame) -> Sequence[int]:
        depth = int(rows["layer"].max()) + 1  # pyright: ignore[reportArgumentType]
        if by_rank:
            layers, ranks = seen.curves["rank/paper/all"]
            return [int(layers[ranks.argmax()]), int(layers[ranks.argmin()])]
        return list(dict.fromkeys(max(1, round(share * depth)) for share in at))

    def draw(shown: pictures.Labeled, of: Sequence[SeenRow]) -> Drawing | None:
        found, most = [], 0
        for (label, rows), seen in zip(shown, of, strict=True):
            cells = pictures.parse_cells(rows, "row", "column", "layer")
            mean = cells.group_by("layer", "row", "column", maintain_order=True).agg(
                pl.col("value").mean()
            )
            layers = chosen(seen, rows)
            most = max(most, len(layers))
            found += [(f"{label}, layer {layer}", mean.filter(layer=layer - 1)) for layer in layers]
        return pictures.squares(found, most)

    return _pictured(names, "attention_picture", "attention, mean over a layer’s heads", draw)


def _pictured(
    names: Names, metric: str, title: str,
    draw: Callable[[pictures.Labeled, Sequence[SeenRow]], Drawing | None],
) -> Titled:  # fmt: skip
    """Draw a picture of the first seed's models, a drawing a group."""
    results = names.results

    def draw_group(group: str) -> Drawing | None:
        of = {
            row: seen
            for row in results.rows
            if (seen := results.seen.get((group, row, results.seeds[0]))) is not None
            and metric in seen.pictures
        }
        shown = [(names.label(row), seen.pictures[metric]) for row, seen in of.items()]
        return draw(shown, [*of.values()]) if shown else None

    return _each_group(names, f"{title} (seed {results.seeds[0]})", draw_group)


_DRAWN: tuple[Callable[..., Titled], ...] = (
    relative_loss, losses, over_layers, over_positions, over_groups, bars, mean_attention,
    hidden_magnitude, attention_of_layers,
)  # fmt: skip
DRAWINGS = {draw.__name__: draw for draw in _DRAWN}
"""By the name that exhibits write."""


def _curves(
    names: Names, curve: Callable[[At], Curve | None], x: str, title: str, *, zero: bool = False,
    ranks: bool = False,
) -> Titled:  # fmt: skip
    """Draw a curve of each row, the mean over seeds ± one standard error, a chart a group.

    Ranks have a logarithmic axis, as in a diagnosis; their bands end at 1.
    """
    results = names.results

    def draw(group: str) -> Drawing | None:
        frames = []
        for row in results.rows:
            curves = [
                drawn
                for seed in results.seeds
                if (group, row, seed) in results.seen
                and (drawn := curve(At(results, group, row, seed))) is not None
                and len(drawn[0])
            ]
            if curves:
                frames.append(_mean(curves).with_columns(row=pl.lit(names.label(row))))
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
        return names.draw_lines(frame, axis, y, height=300, points=x == "layer", under=under)

    return _each_group(names, title, draw)


def _mean(curves: Sequence[Curve]) -> pl.DataFrame:
    """Return the mean over seeds at the places that all have, ± one standard error."""
    shared = curves[0][0]
    for place, _ in curves[1:]:
        shared = np.intersect1d(shared, place)
    every = max(1, -(-len(shared) // _MOST_POINTS))
    shared = shared[(len(shared) - 1) % every :: every]
    values = np.array([y[np.searchsorted(x, shared)] for x, y in curves])
    return pl.DataFrame(
        [{"x": x, **_spread(list(y))} for x, y in zip(shared, values.T, strict=True)],
        schema=dict.fromkeys(("x", "value", "low", "high"), pl.Float64),
    )


def _spread(values: list[float]) -> dict[str, float | None]:
    mean, error = mean_and_error(values)
    several = len(values) > 1
    return {
        "value": mean,
        "low": mean - error if several else None,
        "high": mean + error if several else None,
    }


def _paired(results: Results, group: str, row: str, figure: str) -> list[float]:
    pairs = (
        (figure_of(results, group, row, seed, figure),
         figure_of(results, group, results.baseline, seed, figure))
        for seed in results.seeds
    )  # fmt: skip
    return [ours - base for ours, base in pairs if ours is not None and base is not None]


def _printed(names: Names, group: str, row: str, figure: str, against: bool) -> float | None:
    cells, base = names.exhibit.table.cells, names.results.baseline
    own = cells.get((named(names.exhibit, group, row), figure))
    other = cells.get((named(names.exhibit, group, base), figure)) if against else 0.0
    if isinstance(own, int | float) and isinstance(other, int | float):
        return float(own - other)
    return None
