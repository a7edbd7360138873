"""Pictures of attention and hidden states as heat maps, side by side."""

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from wakeful.diagnosis.heads import WEIGHT_TICKS, split_list
from wakeful.probes.base import Frame
from wakeful.reports.charts import SHARE, Drawing, heatmap, tip, wide

MAGNITUDES = (0, 10_000)
"""The scale of mean |x|, by symlog, in every picture of every model."""
_SQUARE = 220
_BARE = alt.Axis(labels=False, ticks=False)
_THOUSANDTHS, _HUNDREDTHS = ("thousandths", 1000), ("hundredths", 100)
"""Unit of cells, as fine as a color shows: whole numbers are half as long to write."""
Labeled = Sequence[tuple[str, Frame]]
"""(label, rows of one picture's metric) for each picture; a single picture's label is not drawn."""


def mean_attention(frames: Labeled) -> Drawing | None:
    """Draw the mean attention of all heads and layers among the first positions; None if there are
    no rows.
    """
    return squares([(label, parse_cells(rows, "row", "column")) for label, rows in frames])


def squares(cells: Sequence[tuple[str, pl.DataFrame]], columns: int = 3) -> Drawing | None:
    """Draw frames of weights by query (`row`) and key (`column`), `columns` pictures side by side.

    `cells` has (label, frame) for each picture. None if all are empty.
    """
    x = alt.X("column:O", title="key", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    y = alt.Y("row:O", title="query", axis=alt.Axis(labelOverlap=True))
    legend = alt.Legend(title="mean weight", values=WEIGHT_TICKS)
    tooltip = [alt.Tooltip("row:O", title="query"), alt.Tooltip("column:O", title="key"),
               tip("value", ".3f")]  # fmt: skip
    chart = _draw_cells(
        cells, x, y, legend, _THOUSANDTHS, type="sqrt", domain=SHARE, tooltip=tooltip
    )
    return chart and _in_columns(chart.properties(width=_SQUARE, height=_SQUARE), cells, columns)


def hidden_states(frames: Labeled) -> Drawing | None:
    """Draw the magnitude of hidden states, positions by channel bins; None without rows."""
    cells = [(label, parse_cells(rows, "row", "column")) for label, rows in frames]
    x = alt.X("column:O", title="channels, binned by their largest", axis=_BARE)
    y = alt.Y("row:O", title="position", axis=alt.Axis(labelOverlap=True))
    tooltip = [alt.Tooltip("row:O", title="position"), alt.Tooltip("column:O", title="channel bin"),
               tip("value", ",.3~g", title="mean |x|")]  # fmt: skip
    # Given as `format`, ~s would write all labels in the unit of the largest.
    legend = alt.Legend(title="mean |x|", values=[0, 1, 10, 100, 1000, 10000], gradientLength=240,
                        labelExpr="format(datum.value, '~s')")  # fmt: skip
    chart = _draw_cells(cells, x, y, legend, _HUNDREDTHS, type="symlog", domain=MAGNITUDES,
                   tooltip=tooltip)  # fmt: skip
    if chart is None or len(cells) == 1:
        return chart and wide(chart, _SQUARE)
    return _in_columns(chart.properties(width=2 * _SQUARE, height=_SQUARE), cells, 2)


def _in_columns(
    chart: alt.Chart, cells: Sequence[tuple[str, pl.DataFrame]], columns: int
) -> Drawing:
    """Split a chart by the labels of `cells` into a grid of so many columns; a single one stays."""
    if len(cells) == 1:
        return chart
    header = alt.Header(labelFontSize=13)
    facet = alt.Facet("shown:N", title=None, sort=[label for label, _ in cells], header=header)
    return chart.facet(facet=facet, columns=columns, spacing=16)


def _draw_cells(
    cells: Sequence[tuple[str, pl.DataFrame]], x: alt.X, y: alt.Y, legend: alt.Legend,
    unit: tuple[str, int], **more: Any,
) -> alt.Chart | None:  # fmt: skip
    """Draw frames of (row, column, value) as heat maps; None if all are empty.

    Values are stored as one list for each row, in integer multiples of a unit: `unit` is the name
    of the lists' field and the number of units in 1. `more` goes to `heatmap`.
    """
    unit_name, units_in_1 = unit
    rows: list[dict[str, Any]] = []
    for label, frame in cells:
        cells_of_row: dict[int, dict[int, int | None]] = {}
        for row, column, value in frame.select("row", "column", "value").iter_rows():
            cell_values = cells_of_row.setdefault(row, {})
            cell_values[column] = round(units_in_1 * value) if math.isfinite(value) else None
        rows += [
            {
                "shown": label,
                "row": row,
                unit_name: [cell_values.get(n) for n in range(1 + max(cell_values))],
            }
            for row, cell_values in sorted(cells_of_row.items())
        ]
    if not rows:
        return None
    chart = heatmap(alt.InlineData(values=rows), x, y, "value", legend, **more)
    chart = split_list(chart, unit_name, "counted", "column", ["shown", "row"])
    chart = chart.transform_filter("datum.counted !== null")
    return chart.transform_calculate(value=f"datum.counted / {units_in_1}")


def parse_cells(rows: Frame, row: str, column: str, *more: str) -> pl.DataFrame:
    """Split the pairs in the column `position`, such as "3,5", into two columns of integers.

    `row` and `column` are these columns' names; `value` and the columns named in `more` are kept.
    """
    pair = pl.col("position").str.split(",").list
    columns = {row: pair.get(0).cast(pl.Int64), column: pair.get(1).cast(pl.Int64)}
    return rows.select(*more, "value", **columns)
