"""Charts of a ranked comparison: its fronts of loss against each figure, and its ranks."""

import altair as alt
import polars as pl

from wakeful.comparison.reading import Comparison
from wakeful.exhibits.ranks import Front, Ranking
from wakeful.pages.charts import PALETTE, Drawing, rounded, tip

_KINDS = ("on the front", "baseline", "behind it")
_COLORS = (PALETTE[0], PALETTE[1], PALETTE[-1])


def front_charts(comparison: Comparison, ranking: Ranking) -> list[tuple[str, Drawing]]:
    """Draw every variant's loss against each figure that differs, the front's variants by name."""
    return [
        (f"loss against {front.column.title}", _front(comparison, front))
        for front in ranking.fronts
        if front.points["x"].n_unique() > 1
    ]


def _front(comparison: Comparison, front: Front) -> Drawing:
    base = pl.col("variant") == comparison.baseline
    kind = pl.when(base).then(pl.lit("baseline")).when(pl.col("front")).then(
        pl.lit("on the front")
    ).otherwise(pl.lit("behind it"))  # fmt: skip
    frame = rounded(
        front.points.with_columns(kind=kind).with_columns(
            pl.when(pl.col("front") | base).then("variant").alias("label")
        )
    )
    x = alt.X(
        "x:Q", title=front.column.title, scale=alt.Scale(zero=False, padding=40),
        axis=alt.Axis(tickCount=5, labelFlush=True),
    )  # fmt: skip
    y = alt.Y(
        "loss:Q", title="loss (nats)", scale=alt.Scale(zero=False, padding=28),
        axis=alt.Axis(tickCount=5),
    )  # fmt: skip
    color = alt.Color(
        "kind:N", scale=alt.Scale(domain=list(_KINDS), range=list(_COLORS)), legend=None
    )
    tips = [
        alt.Tooltip("variant:N"),
        tip("x", ".4g", title=front.column.title),
        tip("x_error", ".2g", title="its standard error"),
        tip("loss", ".4f"),
        tip("loss_error", ".4f", title="its standard error"),
    ]
    points = alt.Chart(frame).mark_point(filled=True, size=60, opacity=0.85)
    points = points.encode(x=x, y=y, color=color, tooltip=tips)
    on_front = frame.filter("front").sort("x")
    step = "step-after" if front.column.better == "lower" else "step-before"
    line = alt.Chart(on_front).mark_line(strokeWidth=1.5, opacity=0.6, interpolate=step)
    line = line.encode(x=x, y=y, color=alt.value(_COLORS[0]))
    named = alt.Chart(frame.drop_nulls("label")).mark_text(
        align="left", baseline="middle", dx=7, dy=-2, fontSize=11, angle=330
    )
    named = named.encode(x=x, y=y, text=alt.Text("label:N"))
    return alt.layer(line, points, named).properties(height=300, width="container")


def rank_chart(comparison: Comparison, ranking: Ranking) -> Drawing:
    """Draw each variant's overall rank with its 95% interval, the best on top."""
    frame = rounded(
        pl.DataFrame(
            [
                {
                    "variant": row.variant,
                    "rank": row.overall[0],
                    # Ranks end where the variants do.
                    "low": max(1.0, row.overall[0] - row.reach),
                    "high": min(float(len(ranking.rows)), row.overall[0] + row.reach),
                    "kind": "baseline" if row.variant == comparison.baseline else "on the front",
                }
                for row in ranking.rows
            ]
        )
    )
    y = alt.Y("variant:N", title=None, sort=[row.variant for row in ranking.rows])
    scale = alt.Scale(domain=list(_KINDS), range=list(_COLORS))
    color = alt.Color("kind:N", scale=scale, legend=None)
    points = alt.Chart(frame).mark_point(filled=True, size=80, opacity=1)
    points = points.encode(
        x=alt.X("rank:Q", title="overall rank, 1 the best", scale=alt.Scale(zero=False)),
        y=y,
        color=color,
        tooltip=[alt.Tooltip("variant:N"), *(tip(name, ".2f") for name in ("rank", "low", "high"))],
    )
    layers: list[alt.Chart] = [points]
    if len(ranking.seeds) > 1:
        bars = alt.Chart(frame).mark_rule(strokeWidth=2)
        layers.insert(0, bars.encode(x=alt.X("low:Q"), x2=alt.X2("high:Q"), y=y, color=color))
    return alt.layer(*layers).properties(height=20 * len(frame), width="container")
