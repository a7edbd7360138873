"""Charts of a comparison."""

import math
from collections.abc import Sequence
from functools import partial

import altair as alt
import polars as pl

from wakeful.estimates import student_quantile
from wakeful.reports import charts
from wakeful.reports.value import Chart
from wakeful.training import tables
from wakeful.training.compared import ComparedRuns

METRIC_TITLES = {
    "bos_mass_other": "attention on BOS, no copy due",
    "bos_mass_trigger": "attention on BOS at triggers",
    "value_drain_first": "BOS's value norm over the others'",
    "residual_peak_first": "BOS's residual norm over the others'",
    "excess_loss": "loss over the task's own (nats)",
}
"""Axis title of each figure that is followed over steps."""
_MOST_CURVES = 12
"""Most curves in one chart; of more, none can be found in the legend."""
_STEPS = alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=8, tickMinStep=1))


def drawn_variants(comparison: ComparedRuns) -> list[str]:
    """Return the variants to draw over steps, in their usual order.

    If all are too many for one chart, they are the baseline and the variants of the lowest loss,
    compared with the baseline's. Variants that share no seed with the baseline are left out then.
    """
    if len(comparison.variants) <= _MOST_CURVES:
        return list(comparison.variants)
    differences = {
        name: tables.paired_difference(comparison, name)[0] for name in comparison.variants[1:]
    }
    paired = [name for name, difference in differences.items() if not math.isnan(difference)]
    best = sorted(paired, key=differences.__getitem__)[: _MOST_CURVES - 1]
    return [name for name in comparison.variants if name in {comparison.baseline, *best}]


def relative_loss_chart(comparison: ComparedRuns) -> charts.Drawing | None:
    """Draw each variant's smoothed training loss minus the baseline's: below zero is better.

    None if no drawn variant shares a seed with the baseline.
    """
    window = tables.smoothing_window(comparison)
    frame = tables.relative_training_loss(comparison, window)
    if frame.is_empty():
        return None
    variants = [name for name in drawn_variants(comparison) if name != comparison.baseline]
    # Draw from the first full window on: a mean of fewer steps is mostly of the first, large
    # losses. If no run is as long as a window, draw the last step alone.
    first_step = pl.col("step").max().clip(upper_bound=window)
    frame = frame.filter(pl.col("step") >= first_step, pl.col("variant").is_in(variants))
    if frame.is_empty():
        return None
    y = alt.Y("value:Q", title=f"training loss minus {comparison.baseline} (nats)")
    frame = frame.select("variant", "step", "low", "high", value="difference")
    zero = [charts.line_at("y", 0.0, "zero")]
    return _draw_curves(comparison, frame, y, "+.4f", variants, under=zero)


def training_loss_chart(comparison: ComparedRuns) -> charts.Drawing:
    """Draw the smoothed training loss of each variant's first seed."""
    variants = drawn_variants(comparison)
    frame = tables.training_loss(comparison, tables.smoothing_window(comparison))
    frame = frame.filter(pl.col("variant").is_in(variants)).rename({"loss": "value"})
    y = alt.Y("value:Q", title="training loss (nats per token)", scale=alt.Scale(zero=False))
    return _draw_curves(comparison, frame, y, ".4f", variants)


def metric_charts(comparison: ComparedRuns) -> list[Chart]:
    """Draw each logged metric of the heads over steps: a chart with a line for each variant.

    A line is the mean over layers, heads and seeds. Its band is the 95% confidence interval over
    seeds; a variant with one seed has no band.
    """
    variants, curve_charts = drawn_variants(comparison), list[Chart]()
    table = tables.followed_figures(comparison).filter(pl.col("variant").is_in(variants))
    for name, title in METRIC_TITLES.items():
        frame = table.filter(figure=name)
        if frame.is_empty():
            continue
        half_width = pl.col("error") * pl.col("seeds").map_elements(
            lambda seeds: student_quantile(seeds - 1), return_dtype=pl.Float64
        )
        reach = pl.when(half_width.is_finite()).then(half_width)  # null for one seed
        value = pl.col("value")
        bands = frame.select("variant", "step", value, low=value - reach, high=value + reach)
        y = alt.Y("value:Q", title=title)
        curve_charts.append(
            Chart(title, partial(_draw_curves, comparison, bands, y, ".4f", variants))
        )
    return curve_charts


def difference_chart(comparison: ComparedRuns) -> charts.Drawing | None:
    """Draw each variant's final validation loss minus the baseline's, paired, with its 95%
    interval.

    An interval that is not finite is left out. None if no variant has a difference.
    """
    difference, low, high = (
        pl.col(column) for column in ("difference", "difference_low", "difference_high")
    )
    frame = tables.summary_table(comparison).filter(
        pl.col("variant") != comparison.baseline, difference.is_finite()
    )
    if frame.is_empty():
        return None
    intervals = frame.select(
        "variant", difference,
        low=pl.when(low.is_finite()).then(low), high=pl.when(high.is_finite()).then(high),
    )  # fmt: skip
    title = f"final validation loss minus {comparison.baseline} (nats)"
    x = alt.X("difference:Q", title=title, axis=alt.Axis(tickCount=8))
    tooltip = [
        charts.tip("difference", "+.4f"),
        charts.tip("low", "+.4f", title="95% interval from"),
        charts.tip("high", "+.4f", title="to"),
    ]
    return charts.draw_intervals(
        intervals, "variant", x, _color(comparison), order=comparison.variants, tooltip=tooltip,
        under=[charts.line_at("x", 0.0, "zero")],
    )  # fmt: skip


def _draw_curves(
    comparison: ComparedRuns, frame: pl.DataFrame, y: alt.Y, style: str, variants: Sequence[str],
    under: Sequence[alt.Chart] = (),
) -> charts.Drawing:  # fmt: skip
    """Draw the column `value` of a frame over its column `step`, with a line for each variant.

    `variants` are the names in the legend: those that the frame has. `style` is the format of
    values in tooltips, as d3 writes it. `under` is drawn first, below the lines.
    """
    tooltip = ["variant:N", "step:Q", charts.tip("value", style)]
    chart = charts.draw_lines(
        frame, "variant", list(comparison.names), _STEPS, y, tooltip, at="step",
        legend=alt.Legend(values=list(variants)), under=under,
    )  # fmt: skip
    return chart.properties(height=300, width="container")


def _color(comparison: ComparedRuns) -> alt.Color:
    """Return the variants' colors, which do not change from chart to chart."""
    return charts.encode_colors("variant", comparison.names, legend=None)
