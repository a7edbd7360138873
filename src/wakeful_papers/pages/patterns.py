"""Pictures that probes stored of attention and of hidden states, several models side by side."""

from collections.abc import Sequence

import altair as alt
import polars as pl

from wakeful.pages.charts import SHARE, Drawing, heatmap, rounded, tip
from wakeful.pages.heads import MAGNITUDES, magnitude_legend, placed
from wakeful.probes.base import Frame

Labeled = Sequence[tuple[str, Frame]]
"""A label and the rows of one picture's metric each."""
_SQUARE = 220
_COLUMNS = 3
_BARE = alt.Axis(labels=False, ticks=False)


def mean_attention(shown: Labeled) -> Drawing:
    """Draw `mean_attention` of each model: queries down, keys across."""
    return _squares([(label, placed(rows, "query", "key")) for label, rows in shown], _COLUMNS)


def attention_of_layers(shown: Sequence[tuple[str, Frame, Sequence[int]]]) -> Drawing:
    """Draw `attention_picture` of chosen layers (from 1) of each model, the mean over heads."""
    found = []
    for label, rows, layers in shown:
        cells = placed(rows, "query", "key", "layer")
        mean = cells.group_by("layer", "query", "key", maintain_order=True).agg(
            pl.col("value").mean()
        )
        for layer in layers:
            one = mean.filter(pl.col("layer") == layer - 1).drop("layer")
            found.append((f"{label}, layer {layer}", one))
    return _squares(found, max(len(layers) for _, _, layers in shown))


def hidden_magnitude(shown: Labeled) -> Drawing:
    """Draw `hidden_picture` of each model: positions down, channels across."""
    cells = [(label, placed(rows, "position", "channel")) for label, rows in shown]
    x = alt.X("channel:O", title="channels, binned by their largest", axis=_BARE)
    y = alt.Y("position:O", title="position", axis=_BARE)
    tooltip = ["position:O", "channel:O", tip("value", ",.3~g", title="mean |x|")]
    chart = heatmap(_stacked(cells), x, y, "value", magnitude_legend(), type="symlog",
                    domain=MAGNITUDES, tooltip=tooltip)  # fmt: skip
    return _beside(chart.properties(width=2 * _SQUARE, height=_SQUARE), [*dict(cells)], 2)


def _squares(cells: Sequence[tuple[str, pl.DataFrame]], columns: int) -> Drawing:
    x, y = (alt.X("key:O", title="key", axis=_BARE), alt.Y("query:O", title="query", axis=_BARE))
    tooltip = ["query:O", "key:O", tip("value", ".3f", title="weight")]
    chart = heatmap(_stacked(cells), x, y, "value", "weight", type="sqrt", domain=SHARE,
                    tooltip=tooltip)  # fmt: skip
    square = chart.properties(width=_SQUARE, height=_SQUARE)
    return _beside(square, [label for label, _ in cells], columns)


def _stacked(cells: Sequence[tuple[str, pl.DataFrame]]) -> pl.DataFrame:
    return rounded(pl.concat([frame.with_columns(shown=pl.lit(label)) for label, frame in cells]))


def _beside(chart: alt.Chart, labels: Sequence[str], columns: int) -> Drawing:
    header = alt.Header(labelFontSize=13)
    facet = alt.Facet("shown:N", title=None, sort=list(labels), header=header)
    return chart.facet(facet=facet, columns=columns, spacing=16)
