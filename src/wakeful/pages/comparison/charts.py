"""Charts of a comparison."""

from collections.abc import Sequence

import altair as alt
import polars as pl
import polars.selectors as cs

from wakeful.pages.charts import PALETTE, Drawing
from wakeful.pages.comparison.curves import relative_training_loss, training_loss
from wakeful.pages.comparison.tables import Comparison, summary_table

_MEASURES = (
    ("parameters", "parameters_ratio"),
    ("KV cache a token", "cache_ratio"),
    ("tokens a second", "speed_ratio"),
)
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [10, 2], [1, 3], [6, 2, 2, 2])


def relative_loss_chart(comparison: Comparison, window: int) -> Drawing | None:
    """Draw each variant's smoothed training loss minus the baseline's, below zero is better."""
    frame = relative_training_loss(comparison, window)
    if frame.is_empty():
        return None
    # The first steps are all initialization; averaging starts to mean something after a window.
    steady = frame.filter(pl.col("step") >= pl.col("step").max().clip(upper_bound=window))
    base = alt.Chart(_rounded(steady.select("variant", "step", "difference")))
    shown = [name for name in comparison.drawn if name != comparison.baseline]
    x = alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=8))
    color = _color(comparison, shown=shown)
    lines = base.mark_line(strokeWidth=2).encode(
        x=x,
        y=alt.Y("difference:Q", title=f"training loss minus {comparison.baseline} (nats)"),
        color=color,
        strokeDash=_dash(comparison, shown=shown),
        tooltip=[
            alt.Tooltip("variant:N"),
            alt.Tooltip("step:Q"),
            alt.Tooltip("difference:Q", format="+.4f"),
        ],
    )
    zero = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(opacity=0.6).encode(y="zero:Q")
    layers = [zero]
    band = steady.select("variant", "step", "low", "high").drop_nulls()
    if not band.is_empty():
        layers.append(
            alt.Chart(_rounded(band))
            .mark_area(opacity=0.18)
            .encode(x=x, y="low:Q", y2="high:Q", color=_color(comparison))
        )
    chart = alt.layer(*layers, lines).properties(height=320, width="container")
    return chart.resolve_legend(color="independent", strokeDash="independent")


def training_loss_chart(comparison: Comparison, window: int) -> Drawing:
    """Draw the smoothed training loss of each variant's first seed."""
    return (
        alt.Chart(_rounded(training_loss(comparison, window)))
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=8)),
            y=alt.Y("loss:Q", title="training loss (nats a token)", scale=alt.Scale(zero=False)),
            color=_color(comparison, shown=comparison.drawn),
            strokeDash=_dash(comparison, shown=comparison.drawn),
            tooltip=["variant:N", "step:Q", alt.Tooltip("loss:Q", format=".4f")],
        )
        .properties(height=280, width="container")
    )


def difference_chart(comparison: Comparison) -> Drawing | None:
    """Draw each variant's paired difference in final validation loss, ± one standard error."""
    table = summary_table(comparison).filter(
        pl.col("variant") != comparison.baseline, pl.col("difference").is_finite()
    )
    if table.is_empty():
        return None
    frame = table.select(
        "variant",
        "difference",
        "difference_error",
        low=pl.col("difference") - pl.col("difference_error"),
        high=pl.col("difference") + pl.col("difference_error"),
    )
    base = alt.Chart(frame)
    y = alt.Y("variant:N", title=None, sort=list(comparison.variants))
    title = f"final validation loss minus {comparison.baseline} (nats)"
    color = _color(comparison)
    points = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=alt.X("difference:Q", title=title),
        y=y,
        color=color,
        tooltip=[
            "variant:N",
            alt.Tooltip("difference:Q", format="+.4f"),
            alt.Tooltip("difference_error:Q", format=".4f", title="standard error"),
        ],
    )
    measured = frame.filter(pl.col("difference_error").is_finite())
    bars = (
        alt.Chart(measured)
        .mark_rule(strokeWidth=2)
        .encode(x="low:Q", x2="high:Q", y=y, color=color)
    )
    zero = alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(opacity=0.6).encode(x="zero:Q")
    return alt.layer(zero, bars, points).properties(height=34 * len(frame), width="container")


def cost_charts(comparison: Comparison) -> list[Drawing]:
    """Draw parameters, cache and speed as ratios to the baseline's, a chart each."""
    table = summary_table(comparison)
    return [_cost(comparison, table, *measure) for measure in _MEASURES] if len(table) > 1 else []


def cost_chart(comparison: Comparison) -> Drawing | None:
    """Draw the same side by side in one chart."""
    charts = cost_charts(comparison)
    if not charts:
        return None
    return alt.hconcat(*(chart.properties(width=200) for chart in charts))


def _cost(comparison: Comparison, table: pl.DataFrame, title: str, column: str) -> Drawing:
    frame = _rounded(table.select("variant", ratio=column).drop_nulls())
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
        tooltip=["variant:N", alt.Tooltip("ratio:Q", format=".3f", title=title)],
    )
    bars = base.mark_bar().encode(color=_color(comparison))
    figures = base.mark_text(align="left", dx=4).encode(text=alt.Text("ratio:Q", format=".3f"))
    return alt.layer(bars, figures).properties(
        height=26 * len(frame), width="container", title=title
    )


def _color(comparison: Comparison, *, shown: Sequence[str] = ()) -> alt.Color:
    """Return the variants' colors, stable across charts, with a legend of those `shown`."""
    variants = list(comparison.names)
    colors = [PALETTE[n % len(PALETTE)] for n in range(len(variants))]
    scale = alt.Scale(domain=variants, range=colors)
    legend = alt.Legend(values=list(shown)) if shown else None
    return alt.Color("variant:N", scale=scale, legend=legend)


def _dash(comparison: Comparison, *, shown: Sequence[str]) -> alt.StrokeDash:
    variants = list(comparison.names)
    dashes = [_DASHES[n % len(_DASHES)] for n in range(len(variants))]
    scale = alt.Scale(domain=variants, range=dashes)
    return alt.StrokeDash("variant:N", scale=scale, legend=alt.Legend(values=list(shown)))


def _rounded(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the frame with six significant digits, all that a chart shows."""
    return frame.with_columns(cs.float().round_sig_figs(6))
