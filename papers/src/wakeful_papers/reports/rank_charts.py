"""Charts of a comparison's ranks, and of its loss against its other figures."""

from functools import partial

import altair as alt
import numpy as np
import polars as pl

from wakeful.reports import charts
from wakeful.reports.value import Chart
from wakeful.training.compared import ComparedRuns
from wakeful_papers.exhibits.ranks import Front, Ranking

_COLORS = {
    "on the front": charts.PALETTE[0],
    "baseline": charts.PALETTE[1],
    "behind it": charts.PALETTE[-1],
}
_KIND = charts.encode_names(alt.Color, "kind", [*_COLORS], [*_COLORS.values()], legend=None)


def front_charts(comparison: ComparedRuns, ranking: Ranking) -> list[Chart]:
    """Return charts of the loss against each figure that differs, with labels on the front."""
    return [
        Chart(f"Loss against {front.column.title}", partial(_front, comparison, front),
              f"loss against {front.column.title}")
        for front in ranking.fronts
        if front.points["x"].n_unique() > 1
    ]  # fmt: skip


def _front(comparison: ComparedRuns, front: Front) -> charts.Drawing:
    base = pl.col("variant") == comparison.baseline
    kind = pl.when("front").then(pl.lit("on the front")).otherwise(pl.lit("behind it"))
    kind = pl.when(base).then(pl.lit("baseline")).otherwise(kind)
    frame = _clip_outliers(front.points.with_columns(kind=kind), "x", "→", "←")
    frame = charts.round_digits(_clip_outliers(frame, "loss", "↑", "↓"))
    far = pl.col("x_far") | pl.col("loss_far")
    frame = frame.with_columns(
        pl.when(pl.col("front") | base | far)
        .then(pl.concat_str("variant", "x_note", "loss_note"))
        .alias("label"),
        place=pl.when(far).then(pl.lit("beyond")).otherwise(pl.lit("here")),
    )
    # Points that meet at an edge share a label.
    here = ("x_shown", "loss_shown")
    first = pl.int_range(pl.len()).over(here) == 0
    label = pl.when(~far).then("label").when(first).then(pl.col("label").str.join(", ").over(here))
    frame = frame.with_columns(label=label).drop("x_far", "x_note", "loss_far", "loss_note")
    x = alt.X(
        "x_shown:Q", title=front.column.title, scale=alt.Scale(zero=False, padding=40),
        axis=alt.Axis(tickCount=5, labelFlush=True),
    )  # fmt: skip
    y = alt.Y(
        "loss_shown:Q", title="loss (nats)", scale=alt.Scale(zero=False, padding=28),
        axis=alt.Axis(tickCount=5),
    )  # fmt: skip
    error = "its standard error"
    tooltip = ["variant:N", charts.tip("x", ".4g", title=front.column.title),
            charts.tip("x_error", ".2g", title=error), charts.tip("loss", ".4f"),
            charts.tip("loss_error", ".4f", title=error)]  # fmt: skip
    shape = charts.encode_names(
        alt.Shape, "place", ["here", "beyond"], ["circle", "triangle-up"], legend=None
    )
    points = alt.Chart(frame).mark_point(filled=True, size=60, opacity=0.85)
    points = points.encode(x=x, y=y, color=_KIND, shape=shape, tooltip=charts.tips(tooltip))
    on_front = frame.filter("front").sort("x")
    step = "step-after" if front.column.better == "lower" else "step-before"
    line = alt.Chart(on_front).mark_line(strokeWidth=1.5, opacity=0.6, interpolate=step)
    line = line.encode(x=x, y=y, color=alt.value(charts.PALETTE[0]))
    # Labels are on the side with more room: to the left of points in the right half.
    xs = frame["x_shown"].to_numpy()
    middle = (xs.min() + xs.max()) / 2
    labels: list[alt.Chart] = []
    for right in (False, True):
        side = frame.filter((pl.col("x_shown") > middle) == right).drop_nulls("label")
        texts = alt.Chart(side).mark_text(
            align="right" if right else "left", baseline="middle", dx=-7 if right else 7, dy=-2,
            fontSize=11, angle=330,
        )  # fmt: skip
        labels.append(texts.encode(x=x, y=y, text=alt.Text("label:N")))
    return alt.layer(line, points, *labels).properties(height=300, width="container")


def _clip_outliers(frame: pl.DataFrame, name: str, above: str, below: str) -> pl.DataFrame:
    """Add columns: NAME_shown, the value to draw; NAME_far, True if clipped; NAME_note, for labels.

    A single point far out would press all others into a corner. One further from the quartiles than
    three times their distance (Tukey's outer fences) is drawn at the edge.
    """
    value = pl.col(name)
    low, high = np.quantile(frame[name].to_numpy(), [0.25, 0.75])
    margin = 3 * (high - low)
    far = (value < low - margin) | (value > high + margin) if margin else pl.lit(False)
    near = frame.filter(~far)[name].to_numpy()
    padding = np.ptp(near) / 16
    edges = near.min() - padding, near.max() + padding
    notes = pl.Series(f" {above if x > high else below} {x:.3g}" for x in frame[name])
    return frame.with_columns(
        value.clip(*edges).alias(f"{name}_shown"),
        far.alias(f"{name}_far"),
        pl.when(far).then(notes).otherwise(pl.lit("")).alias(f"{name}_note"),
    )


def rank_chart(comparison: ComparedRuns, ranking: Ranking) -> charts.Drawing:
    """Draw each variant's overall rank with its 95% interval, the best on top."""
    several, last = len(ranking.seeds) > 1, float(len(ranking.rows))
    frame = pl.DataFrame(
        [
            {
                "variant": row.variant,
                "rank": row.overall[0],
                # Ranks end where the variants do.
                "low": max(1.0, row.overall[0] - row.half_width) if several else None,
                "high": min(last, row.overall[0] + row.half_width) if several else None,
                "kind": "baseline" if row.variant == comparison.baseline else "on the front",
            }
            for row in ranking.rows
        ],
        schema_overrides={"low": pl.Float64, "high": pl.Float64},
    )
    x = alt.X("rank:Q", title="overall rank, 1 the best", scale=alt.Scale(zero=False))
    tooltip = [charts.tip(name, ".2f") for name in ("rank", "low", "high")]
    return charts.draw_intervals(
        frame, "variant", x, _KIND,
        order=[row.variant for row in ranking.rows], tooltip=tooltip, row=20,
    )  # fmt: skip
