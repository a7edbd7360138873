"""Charts of single heads: layer × head maps of four metrics, and attention with tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import altair as alt
import polars as pl

from wakeful.diagnosis.measure import ModelDiagnosis
from wakeful.diagnosis.verdict import head_values
from wakeful.probes.base import Frame
from wakeful.reports.charts import RANKS, SHARE, Drawing, heatmap, round_digits, tip, wide
from wakeful.reports.value import Chart

MAGNITUDES = (0, 10_000)
"""The scale of mean |x|, by symlog, in every picture of every model."""
_NUM_FIRST_HEADS = 8
"""How many of the strongest sinks, and of the heads of the highest rank, come first in a list."""
_TOKENS_OF_OTHER_HEADS = 16
"""The tokens that other heads' attention is drawn among: a model of hundreds of heads has it all
in 50 kB of the page."""
_LEVELS = "".join(chr(code) for code in range(ord("!"), 126) if chr(code) not in "\"&'<>\\|")
"""Characters that stand for the weights from 0 to 1, in even steps of the square root, by which
they are colored too."""
_HOLE = "~"
"""Character for a weight that is not there, or not finite."""
_WEIGHTS = [0, 0.05, 0.2, 0.5, 1]
"""Ticks of a color scale of weights that goes by the square root."""
_SQUARE = 220
_BARE = alt.Axis(labels=False, ticks=False)
_THOUSANDTHS, _HUNDREDTHS = ("thousandths", 1000), ("hundredths", 100)
"""Unit of cells, as fine as a color shows: whole numbers are half as long to write."""
_INK = {" ": "␣", "\n": "⏎", "\t": "⇥", "Ġ": "␣", "Ċ": "⏎", "▁": "␣"}
"""Signs for characters that leave no ink."""


@dataclass(frozen=True)
class Map:
    """A metric with a value for each layer and head."""

    metric: str
    variant: str
    title: str
    explained: str


FIRST_SHARE = Map("first_key_share_without_row_0", "paper", "first-token share, without row 0",
                  "the share of queries whose largest weight is the first token's")  # fmt: skip
MAPS = (
    Map("first_key_mass_without_row_0", "paper", "first-token mass, without row 0",
        "the share of its attention that a head gives the first token"),
    FIRST_SHARE,
    Map("rank", "paper", "rank", "singular values that hold the stated share of a head's energy; "
        "1 means that every query gets the same mixture. ≤ marks a bound"),
    Map("entropy", "per_head", "entropy (nats)",
        "how evenly a head spreads attention over tokens; 0 means all on one"),
    Map("value_drain", "per_head", "value drain",
        "the norm of the first token's value over the others' mean; near 0 it adds nothing"),
)  # fmt: skip


def head_map(diagnosis: ModelDiagnosis, metric_map: Map, longest: int = 0) -> Drawing:
    """Draw a heat map of a metric over layers and heads, on the same scale for all models.

    `longest` is the length in tokens of the longest sequence among the models compared.
    """
    longest = max(longest, diagnosis.length)
    domain: tuple[float, float] = SHARE
    scale_type: Any = "linear"
    ticks: Any = alt.Undefined
    if metric_map.metric == "rank":
        domain, scale_type = (1.0, float(longest)), "log"
        ticks = [rank for rank in RANKS if rank <= longest]
    elif metric_map.metric == "entropy":
        domain = (0.0, round_up(longest))
    elif metric_map.metric == "value_drain":
        domain = (0.0, 2.0)
    rows = head_values(diagnosis, metric_map.metric, metric_map.variant)
    frame = round_digits(
        rows.select("layer", "head", "kind", "value", shown=pl.col("value").clip(*domain)), 4
    )
    x = alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    name = "key/value head" if metric_map.metric == "value_drain" else "head"
    y = alt.Y("head:O", title=name, axis=alt.Axis(labelOverlap=True))
    tooltip = ["layer:O", "head:O", tip("value", ",.3~g", title=metric_map.title),
               "kind:N"]  # fmt: skip
    legend = alt.Legend(title=metric_map.title, values=ticks, gradientLength=240)
    cells = heatmap(frame, x, y, "shown", legend, type=scale_type, domain=domain, tooltip=tooltip)
    bound, height = frame.filter(kind="bound"), 14 * frame["head"].n_unique()
    if bound.is_empty():
        return wide(cells, height)
    # A rank that is only an upper bound is marked with ≤.
    marks = alt.Chart(bound).mark_text(text="≤", fontSize=9)
    marks = marks.encode(x=x, y=y, color=alt.ColorValue("white"))
    return wide(alt.layer(cells, marks), height)


def round_up(length: int) -> float:
    """Return the largest entropy of `length` tokens, log(length), rounded up to the next half."""
    return math.ceil(2 * math.log(length)) / 2


def maps(diagnosis: ModelDiagnosis, longest: int) -> list[Chart]:
    """Return a heat map of every metric that was measured for each head."""
    name = diagnosis.name
    return [
        Chart(f"{metric.title} of each layer and head of {name}",
              partial(head_map, diagnosis, metric, longest), f"{name}: {metric.title}",
              metric.explained)
        for metric in MAPS
        if not head_values(diagnosis, metric.metric, metric.variant).is_empty()
    ]  # fmt: skip


def describe_sink(diagnosis: ModelDiagnosis) -> str:
    """Return a sentence on the position that gets the most attention in the most layers.

    Only layers where it is the same in all sequences count; "" if there are none, or the run did
    not measure it.
    """
    rows = diagnosis.rows.filter(metric="leading_key", variant="code")
    rows = rows.filter(pl.col("head").is_null())
    # A mean position with an error over sequences is of different positions.
    is_unanimous = pl.col("standard_error").is_null() | (pl.col("standard_error") == 0)
    positions = rows.filter(is_unanimous)["value"].cast(pl.Int64)
    if positions.is_empty():
        return ""
    position = int(positions.mode().sort()[0])
    quoted = ""
    if position < len(diagnosis.tokens):
        quoted = f"“{visible_text(diagnosis.tokens[position])}” at "
    first = "" if position else ", the first"
    return (
        f"The token with the most attention is {quoted}position {position}{first}: it leads in "
        f"{(positions == position).sum()} of {len(rows)} layers."
    )


def visible_text(text: str) -> str:
    """Return the text of a token with a visible sign for each space, newline and tab."""
    return "".join(_INK.get(letter, letter) for letter in text) or "∅"


def attention(
    diagnosis: ModelDiagnosis, order: Literal["sinks", "widest", "sinks, then widest"]
) -> Drawing | None:
    """Draw one head's attention among the first tokens, with a list to choose the head from.

    The list begins with the strongest sinks ("sinks"), the heads of the highest rank ("widest"), or
    both. With sinks, all other heads follow layer by layer, with fewer tokens each. Return None if
    no attention was kept.
    """
    stored = diagnosis.attention
    if stored is None or stored.is_empty():
        return None
    kinds = order.split(", then ")  # "sinks", "widest" or both
    mass = head_values(diagnosis, "first_key_mass_without_row_0")
    mass = mass.select("layer", "head", mass="value")
    ranks = head_values(diagnosis, "rank").select("layer", "head", rank="value")
    heads = stored.select("layer", "head").unique(maintain_order=True)
    for values in (mass, ranks):
        heads = heads.join(values, on=["layer", "head"], how="left", maintain_order="left")
    first_heads = [
        heads.sort(column, descending=True, nulls_last=True).head(_NUM_FIRST_HEADS)
        for column, kind in (("mass", "sinks"), ("rank", "widest"))
        if kind in kinds
    ]
    first_heads = pl.concat(first_heads).unique(["layer", "head"], maintain_order=True)
    other_heads = heads.join(first_heads, on=["layer", "head"], how="anti", maintain_order="left")
    listed = pl.concat([first_heads, other_heads]) if "sinks" in kinds else first_heads
    first_tokens = stored.filter(pl.max_horizontal("query", "key") < _TOKENS_OF_OTHER_HEADS)
    all_cells = stored.partition_by("layer", "head", as_dict=True)
    few_cells = first_tokens.partition_by("layer", "head", as_dict=True)
    cells_of_head: dict[str, pl.DataFrame] = {}
    for number, row in enumerate(listed.iter_rows(named=True)):
        name = f"layer {row['layer']}, head {row['head']}"
        if row["mass"] is not None:
            name += f": first-token mass {row['mass']:.2f}"
        if row["rank"] is not None:
            name += f", rank {row['rank']:.0f}"
        cells = all_cells if number < len(first_heads) else few_cells
        cells_of_head[name] = cells[row["layer"], row["head"]]
    labels = [f"{n} {visible_text(text)}" for n, text in enumerate(diagnosis.tokens)]
    labels = labels[: stored["key"].n_unique()]  # more texts are kept than tokens drawn
    return _draw_choosable_heads(cells_of_head, labels, ("key", "query"), 16)


def pooled_attention(diagnosis: ModelDiagnosis) -> Drawing:
    """Draw the attention of one head over whole sequences, in bins, with a list to choose the head
    from.
    """
    rows = diagnosis.rows.filter(metric="attention_picture")
    rows = parse_cells(rows, "query", "key", "layer", "head")
    cells_of_head = {
        f"layer {layer}, head {head}": cells
        for (layer, head), cells in rows.group_by("layer", "head", maintain_order=True)
    }
    return _draw_choosable_heads(cells_of_head, [], ("key, in bins", "query, in bins"), 10)


def _draw_choosable_heads(
    cells_of_head: Mapping[str, pl.DataFrame],
    labels: Sequence[str],
    titles: tuple[str, str],
    step: int,
) -> Drawing:
    """Draw the attention weights of one head by query and key, with a list to choose the head from.

    `cells_of_head` has (query, key, value) for each head by its name; `labels` are the tokens'
    texts, if there are any; `titles` are those of the x and the y axis; `step` is a cell's height
    in pixels. A head's weights are stored as one string and split when drawn, because a model has
    hundreds of thousands.
    """
    rows = [
        {"of": n, "weights": _encode_weights(cells)}
        for n, cells in enumerate(cells_of_head.values())
    ]
    # Rows name their head by number: the names once more would be a sixth of the data.
    names = list(cells_of_head)
    bind = alt.binding_select(options=list(range(len(names))), labels=names, name="head ")
    pick = alt.param(name="shown", value=0, bind=bind)
    label = "labels[datum.value]" if labels else "datum.value"
    x_title, y_title = titles
    x = alt.X("key:O", title=x_title, axis=alt.Axis(
        labelExpr=label, labelAngle=-60 if labels else 0, labelOverlap=not labels))  # fmt: skip
    y = alt.Y("query:O", title=y_title, axis=alt.Axis(labelExpr=label, labelOverlap=not labels))
    legend = alt.Legend(title="attention weight", values=_WEIGHTS, gradientLength=240)
    tooltip = ["query:O", "key:O", tip("weight", ".2f")]
    chart = heatmap(
        alt.InlineData(values=rows), x, y, "weight", legend, type="sqrt", domain=SHARE,
        tooltip=tooltip,
    )  # fmt: skip
    chart = chart.transform_filter("datum.of === shown")
    # Parts go into fields of their own: a head that is chosen again is split again.
    chart = chart.transform_calculate(lines="split(datum.weights, '|')")
    chart = _split_list(chart, "lines", "line", "query", [])
    chart = chart.transform_calculate(cells="split(datum.line, '')")
    chart = _split_list(chart, "cells", "cell", "key", ["query"])
    chart = chart.transform_filter(f"datum.cell !== '{_HOLE}'")
    share = f"indexof(levels, datum.cell) / {len(_LEVELS) - 1}"
    chart = chart.transform_calculate(weight=f"pow({share}, 2)")
    chart = chart.add_params(pick, alt.param(name="levels", value=_LEVELS))
    if labels:
        chart = chart.add_params(alt.param(name="labels", value=list(labels)))
    return wide(chart, step * max(cells["query"].n_unique() for cells in cells_of_head.values()))


def _encode_weights(cells: pl.DataFrame) -> str:
    """Return one head's weights as text: a line for each query, from 0, lines separated by "|", and
    in it a character for each key, from 0. See `_LEVELS` and `_HOLE`.
    """
    highest = len(_LEVELS) - 1
    lines: dict[int, list[str]] = {}
    for query, key, value in cells.sort("query", "key").select("query", "key", "value").iter_rows():
        line = lines.setdefault(query, [])
        line += _HOLE * (key - len(line))  # keys that are not there
        if value is None or not math.isfinite(value):
            line.append(_HOLE)
        else:
            line.append(_LEVELS[round(highest * min(max(value, 0), 1) ** 0.5)])
    return "|".join("".join(line) for line in lines.values())


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
    legend = alt.Legend(title="mean weight", values=_WEIGHTS)
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
    chart = _split_list(chart, unit_name, "counted", "column", ["shown", "row"])
    chart = chart.transform_filter("datum.counted !== null")
    return chart.transform_calculate(value=f"datum.counted / {units_in_1}")


def _split_list(
    chart: alt.Chart, list_field: str, entry_field: str, index_field: str, groupby: Sequence[str]
) -> alt.Chart:
    """Split each row of a chart's data into one for every entry of the list in `list_field`.

    The entry goes to `entry_field` and its index, from 0 among rows that agree in the fields
    `groupby`, to `index_field`.
    """
    chart = chart.transform_flatten([list_field], as_=[entry_field])
    number: Any = [{"op": "row_number", "as": "number"}]
    chart = chart.transform_window(number, groupby=list(groupby))
    return chart.transform_calculate(**{index_field: "datum.number - 1"})


def parse_cells(rows: Frame, row: str, column: str, *more: str) -> pl.DataFrame:
    """Split the pairs in the column `position`, such as "3,5", into two columns of integers.

    `row` and `column` are these columns' names; `value` and the columns named in `more` are kept.
    """
    pair = pl.col("position").str.split(",").list
    columns = {row: pair.get(0).cast(pl.Int64), column: pair.get(1).cast(pl.Int64)}
    return rows.select(*more, "value", **columns)
