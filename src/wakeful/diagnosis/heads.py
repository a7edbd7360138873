"""Charts of single heads: layer × head maps of two metrics, and attention with tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import altair as alt
import polars as pl

from wakeful.diagnosis.measure import ModelDiagnosis
from wakeful.diagnosis.verdict import head_values
from wakeful.reports.charts import RANKS, SHARE, Drawing, heatmap, round_digits, tip, wide
from wakeful.reports.value import Chart

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
WEIGHT_TICKS = [0, 0.05, 0.2, 0.5, 1]
"""Ticks of a color scale of weights that goes by the square root."""
_INK = {" ": "␣", "\n": "⏎", "\t": "⇥", "Ġ": "␣", "Ċ": "⏎", "▁": "␣"}
"""Signs for characters that leave no ink."""


@dataclass(frozen=True)
class Map:
    """A metric with a value for each layer and head."""

    metric: str
    title: str
    explained: str


MAPS = (
    Map("first_key_mass_without_row_0", "first-token mass, without row 0",
        "the share of its attention that a head gives the first token"),
    Map("rank", "rank", "singular values that hold the stated share of a head's energy; "
        "1 means that every query gets the same mixture. ≤ marks a bound"),
)  # fmt: skip


def head_map(diagnosis: ModelDiagnosis, metric_map: Map, longest: int = 0) -> Drawing:
    """Draw a heat map of a metric over layers and heads.

    `longest` is the length in tokens of the longest sequence among the models compared. Ranks go up
    to it, so that all models' maps have one scale.
    """
    longest = max(longest, diagnosis.length)
    domain: tuple[float, float] = SHARE
    scale_type: Any = "linear"
    ticks: Any = alt.Undefined
    if metric_map.metric == "rank":
        domain, scale_type = (1.0, float(longest)), "log"
        ticks = [rank for rank in RANKS if rank <= longest]
    rows = head_values(diagnosis, metric_map.metric)
    frame = round_digits(
        rows.select("layer", "head", "kind", "value", shown=pl.col("value").clip(*domain)), 4
    )
    x = alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    y = alt.Y("head:O", title="head", axis=alt.Axis(labelOverlap=True))
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


def head_maps(diagnosis: ModelDiagnosis, longest: int, *, only_mass: bool = False) -> list[Chart]:
    """Return heat maps over layers and heads: of the first token's mass, and of ranks as well
    unless `only_mass`. A metric that was not measured has none.

    `longest` is the length in tokens of the longest sequence among the models compared.
    """
    name = diagnosis.name
    chosen_maps = MAPS[:1] if only_mass else MAPS
    return [
        Chart(f"{metric_map.title} of each layer and head of {name}",
              partial(head_map, diagnosis, metric_map, longest), f"{name}: {metric_map.title}",
              metric_map.explained)
        for metric_map in chosen_maps
        if not head_values(diagnosis, metric_map.metric).is_empty()
    ]  # fmt: skip


def visible_text(text: str) -> str:
    """Return the text of a token with a visible sign for each space, newline and tab."""
    return "".join(_INK.get(letter, letter) for letter in text) or "∅"


def draw_attention(diagnosis: ModelDiagnosis) -> Drawing | None:
    """Draw one head's attention among the first tokens, with a list to choose the head from.

    The list begins with the heads that give the first token most attention and those of the highest
    rank; all other heads follow layer by layer, with fewer tokens each. Return None if no attention
    was kept.
    """
    stored = diagnosis.attention
    if stored is None or stored.is_empty():
        return None
    mass = head_values(diagnosis, "first_key_mass_without_row_0")
    mass = mass.select("layer", "head", mass="value")
    ranks = head_values(diagnosis, "rank").select("layer", "head", rank="value")
    heads = stored.select("layer", "head").unique(maintain_order=True)
    for values in (mass, ranks):
        heads = heads.join(values, on=["layer", "head"], how="left", maintain_order="left")
    highest_heads = [
        heads.sort(column, descending=True, nulls_last=True).head(_NUM_FIRST_HEADS)
        for column in ("mass", "rank")
    ]
    # A head that is among both is listed once.
    first_heads = pl.concat(highest_heads).unique(["layer", "head"], maintain_order=True)
    other_heads = heads.join(first_heads, on=["layer", "head"], how="anti", maintain_order="left")
    first_tokens = stored.filter(pl.max_horizontal("query", "key") < _TOKENS_OF_OTHER_HEADS)
    all_cells = stored.partition_by("layer", "head", as_dict=True)
    few_cells = first_tokens.partition_by("layer", "head", as_dict=True)
    cells_of_head: dict[str, pl.DataFrame] = {}  # by the head's name in the list
    for number, row in enumerate(pl.concat([first_heads, other_heads]).iter_rows(named=True)):
        name = f"layer {row['layer']}, head {row['head']}"
        if row["mass"] is not None:
            name += f": first-token mass {row['mass']:.2f}"
        if row["rank"] is not None:
            name += f", rank {row['rank']:.0f}"
        cells = all_cells if number < len(first_heads) else few_cells
        cells_of_head[name] = cells[row["layer"], row["head"]]
    labels = [f"{n} {visible_text(text)}" for n, text in enumerate(diagnosis.tokens)]
    labels = labels[: stored["key"].n_unique()]  # more texts are kept than tokens drawn
    return _draw_choosable_heads(cells_of_head, labels)


def _draw_choosable_heads(
    cells_of_head: Mapping[str, pl.DataFrame], labels: Sequence[str]
) -> Drawing:
    """Draw the attention weights of one head by query and key, with a list to choose the head from.

    `cells_of_head` has the columns query, key and value for each head, by the head's name; `labels`
    are the tokens' texts. A model has hundreds of thousands of weights: a head's are stored as one
    string, which the chart splits when it draws the head.
    """
    rows = [
        {"of": n, "weights": _encode_weights(cells)}
        for n, cells in enumerate(cells_of_head.values())
    ]
    # Rows name their head by number: the names once more would be a sixth of the data.
    names = list(cells_of_head)
    bind = alt.binding_select(options=list(range(len(names))), labels=names, name="head ")
    pick = alt.param(name="shown", value=0, bind=bind)
    label = "labels[datum.value]"
    axis = alt.Axis(labelExpr=label, labelAngle=-60, labelOverlap=False)
    x = alt.X("key:O", title="key", axis=axis)
    y = alt.Y("query:O", title="query", axis=alt.Axis(labelExpr=label, labelOverlap=False))
    legend = alt.Legend(title="attention weight", values=WEIGHT_TICKS, gradientLength=240)
    tooltip = ["query:O", "key:O", tip("weight", ".2f")]
    chart = heatmap(
        alt.InlineData(values=rows), x, y, "weight", legend, type="sqrt", domain=SHARE,
        tooltip=tooltip,
    )  # fmt: skip
    chart = chart.transform_filter("datum.of === shown")
    # Each step writes to new fields: the stored string stays, to be split again later.
    chart = chart.transform_calculate(lines="split(datum.weights, '|')")
    chart = split_list(chart, "lines", "line", "query", [])
    chart = chart.transform_calculate(cells="split(datum.line, '')")
    chart = split_list(chart, "cells", "cell", "key", ["query"])
    chart = chart.transform_filter(f"datum.cell !== '{_HOLE}'")
    share = f"indexof(levels, datum.cell) / {len(_LEVELS) - 1}"
    chart = chart.transform_calculate(weight=f"pow({share}, 2)")
    chart = chart.add_params(
        pick, alt.param(name="levels", value=_LEVELS), alt.param(name="labels", value=list(labels))
    )
    return wide(chart, 16 * max(cells["query"].n_unique() for cells in cells_of_head.values()))


def _encode_weights(cells: pl.DataFrame) -> str:
    """Return one head's weights as text: a line for each query, with a character for each key.

    Lines are separated by "|"; queries and keys count from 0. A character of `_LEVELS` stands for
    the square root of a weight, `_HOLE` for a weight that is missing or not finite.
    """
    highest = len(_LEVELS) - 1
    lines: dict[int, list[str]] = {}
    for query, key, value in cells.sort("query", "key").select("query", "key", "value").iter_rows():
        line = lines.setdefault(query, [])
        line += _HOLE * (key - len(line))  # keys between the last one and this one
        if value is None or not math.isfinite(value):
            line.append(_HOLE)
        else:
            within_range = min(max(value, 0), 1)  # rounding may leave a weight outside
            line.append(_LEVELS[round(highest * within_range**0.5)])
    return "|".join("".join(line) for line in lines.values())


def split_list(
    chart: alt.Chart, list_field: str, entry_field: str, index_field: str, groupby: Sequence[str]
) -> alt.Chart:
    """Split each row of a chart's data into one row for every entry of the list in `list_field`.

    The entry goes to the field `entry_field`, and its index to `index_field`. Indices count from 0
    anew for every value of the fields `groupby`.
    """
    chart = chart.transform_flatten([list_field], as_=[entry_field])
    # Vega's row numbers count from 1.
    number: Any = [{"op": "row_number", "as": "number"}]
    chart = chart.transform_window(number, groupby=list(groupby))
    return chart.transform_calculate(**{index_field: "datum.number - 1"})
