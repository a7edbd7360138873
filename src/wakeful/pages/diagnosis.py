"""What a diagnosis says: figures for a summary, plain words, charts, and one offline HTML page."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import altair as alt
import polars as pl

from wakeful.estimates import finite
from wakeful.evaluation.diagnosis import Diagnosis
from wakeful.pages.charts import Drawing, colored, colors, heatmap, tip, wide
from wakeful.pages.page import write_page
from wakeful.probes.base import block_outputs, mean_over_layers

_COMPARED = (
    ("loss", "loss (nats)", "{:.4f}"),
    ("first_key_share_without_row_0", "first-token share, without row 0", "{:.3f}"),
    ("first_key_share_with_row_0", "first-token share, with row 0", "{:.3f}"),
    ("first_key_mass_without_row_0", "first-token mass, without row 0", "{:.3f}"),
    ("first_key_mass_with_row_0", "first-token mass, with row 0", "{:.3f}"),
    ("stored_prefix_mass", "mass on the stored prefix", "{:.3f}"),
    ("entropy", "entropy (nats)", "{:.3f}"),
    ("median_head_rank", "median head rank", "{:.0f}"),
    ("heads_near_rank_1", "heads near rank 1", "{:.0f}"),
    ("value_drain_lowest", "lowest value drain", "{:.3f}"),
    ("kurtosis_first", "kurtosis, first", "{:.1f}"),
    ("kurtosis_rest", "kurtosis, rest", "{:.1f}"),
    ("max_activation_first", "max |x|, first", "{:,.1f}"),
    ("max_activation_rest", "max |x|, rest", "{:,.1f}"),
)
_CURVES = (
    ("first_key_share_without_row_0", "paper", "all", "share of pairs led by key 0, without row 0"),
    ("first_key_mass_without_row_0", "paper", "all", "attention mass on key 0, without row 0"),
    ("entropy", "code", "all", "entropy of importance (nats)"),
    ("rank", "paper", "all", "largest head rank"),
    ("mass_columns", "paper", "all", "columns holding the mass"),
    ("value_eigenvalue", "paper", "1", "largest value eigenvalue"),
    ("value_drain", "paper", "first", "‖v₀‖ over the others' mean"),
    ("residual_peak", "paper", "first", "‖h₀‖ over the others' mean"),
    ("kurtosis", "paper", "first", "kurtosis, first token"),
    ("kurtosis", "paper", "rest", "kurtosis, the rest"),
    ("max_activation", "paper", "first", "max |x|, first token"),
    ("max_activation", "paper", "rest", "max |x|, the rest"),
    ("token_similarity", "paper", "all", "token similarity (cosine)"),
    ("block_influence", "paper", "all", "block influence"),
    ("angular_distance", "paper", "last", "angular distance (of π)"),
)
"""Metric, variant, position and title of each curve over layers."""
_LOG = {"kurtosis", "max_activation", "residual_peak", "value_eigenvalue"}
_LAYERS = alt.X(
    "layer:Q", title="layer", scale=alt.Scale(nice=False, zero=False, padding=6),
    axis=alt.Axis(tickMinStep=1, format="d"),
)  # fmt: skip
"""From the first layer, the embedding's −1 or 0, to the last."""
_BARE = alt.Axis(labels=False, ticks=False)
Level = Literal["good", "mixed", "bad"]


@dataclass(frozen=True)
class Finding:
    """One statement of the verdict: what was measured, what it means, what others have."""

    title: str
    level: Level
    text: str
    band: str
    """Published figures to compare with."""


def layer_values(
    diagnosis: Diagnosis, metric: str, *, variant: str = "paper", position: str = "all"
) -> pl.DataFrame:
    """Return a metric's row for each layer: layer, value, standard_error, kind."""
    rows = diagnosis.rows.filter(metric=metric, variant=variant, position=position)
    return rows.filter(pl.col("head").is_null()).sort("layer")


def head_values(diagnosis: Diagnosis, metric: str) -> pl.DataFrame:
    """Return a metric's row for each layer and head."""
    rows = diagnosis.rows.filter(metric=metric, variant="paper")
    return rows.filter(pl.col("head").is_not_null()).sort("layer", "head")


def summary(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the figures that papers print, each a mean over layers unless its name says more."""

    def mean(metric: str, **where: str) -> float | None:
        return mean_over_layers(layer_values(diagnosis, metric, **where))

    ranks = head_values(diagnosis, "rank")
    drain = layer_values(diagnosis, "value_drain", position="first")
    return {
        "model": diagnosis.name,
        "architecture": diagnosis.architecture,
        "layers": diagnosis.num_layers,
        "length": diagnosis.length,
        "sequences": diagnosis.num_sequences,
        "loss": diagnosis.loss,
        "loss_standard_error": finite(diagnosis.loss_error),
        # The first token's, each with row 0, which sees nothing else, and without it.
        **{
            name: mean(name)
            for part in ("share", "mass")
            for name in (f"first_key_{part}_with_row_0", f"first_key_{part}_without_row_0")
        },
        "stored_prefix_mass": mean("stored_prefix_mass"),
        "entropy": mean("entropy", variant="code"),
        "value_drain_lowest": drain["value"].min(),
        "lazy_layers": lazy_layers(diagnosis),
        "heads_near_rank_1": int(layer_values(diagnosis, "near_rank_1")["value"].sum()),
        "heads": len(ranks),
        "median_head_rank": ranks["value"].median(),
        "ranks_that_are_bounds": int((ranks["kind"] == "bound").sum()),
        "suggested_depth": suggested_depth(diagnosis),
        **{
            f"{metric}_{position}": mean(metric, position=position)
            for metric in ("kurtosis", "max_activation")
            for position in ("first", "rest")
        },
    }


def lazy_layers(diagnosis: Diagnosis) -> list[int]:
    """Return the layers whose every head has a rank at or under the threshold."""
    return layer_values(diagnosis, "lazy").filter(pl.col("value") > 0)["layer"].to_list()


def suggested_depth(diagnosis: Diagnosis) -> int:
    """Return how many first layers to inherit: all up to the last that is not lazy.

    A lazy layer before a working one has to stay, for the layers after it were trained on its
    output; with no lazy layer at the end that is the whole depth, and the paper's default of half
    the layers is then a choice without this evidence.
    """
    lazy = set(lazy_layers(diagnosis))
    return 1 + max((n for n in range(diagnosis.num_layers) if n not in lazy), default=0)


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """Return the verdict on sinks, lazy layers, drained values and outliers."""
    figures, layers = summary(diagnosis), diagnosis.num_layers
    share, mass = (figures[f"first_key_{part}_without_row_0"] for part in ("share", "mass"))
    near, heads, lazy = figures["heads_near_rank_1"], figures["heads"], figures["lazy_layers"]
    drain = layer_values(diagnosis, "value_drain", position="first")
    drained = len(drain.filter(pl.col("value") < 0.5))
    first, rest = figures["kurtosis_first"], figures["kurtosis_rest"]
    bounds = figures["ranks_that_are_bounds"]
    kept = figures["stored_prefix_mass"]
    stored = "" if kept is None else f"; the stored prefix holds {kept:.1%}"
    whole = "No layer is lazy as a whole"
    if lazy:
        whole = f"{len(lazy)} of {layers} layers are lazy ({', '.join(map(str, lazy))})"
    return [
        Finding(
            "Attention sinks",
            sink_level(share or 0.0),
            f"The first token is the most attended key of {share:.1%} of (query, head) pairs and "
            f"takes {mass:.1%} of all attention, its own row left out{stored}.",
            "GPT-2 medium 76% and 52%; softmax-1 models about 2% (From Attention to Activation).",
        ),
        Finding(
            "Lazy layers",
            "bad" if lazy else _level(near / max(1, heads), 0.1, 0.4),
            f"{whole}; {near} of {heads} heads are near rank 1 and the median head's rank is "
            f"{figures['median_head_rank']:.0f} of {diagnosis.length}. "
            f"Suggested depth to inherit: {figures['suggested_depth']}."
            + (f" {bounds} ranks are bounds." if bounds else ""),
            "About half of Llama-3-8B's heads are near rank 1 (When Attention Collapses, fig. 11).",
        ),
        Finding(
            "Drained values",
            _level(drained / layers, 0.1, 0.5),
            f"The first token's values have less than half the norm of the others' in "
            f"{drained} of {layers} layers; at the lowest, "
            f"{figures['value_drain_lowest']:.2f} of it.",
            "ResFormer keeps about 0.7 (Value Residual Learning, appendix A.2).",
        ),
        Finding(
            "Outlier activations",
            _level(max(first, rest or 0.0), 12.0, 60.0),
            f"Mean kurtosis is {first:.1f} at the first token and {rest or math.nan:.1f} at the "
            f"rest (a Gaussian has 3); the largest activation of the first token is "
            f"{figures['max_activation_first']:,.0f} on average{_channel(diagnosis)}.",
            "GPT-2 130M 514.9 and 141.5; with softmax-1 and OrthoAdam 10.1 and 7.3 (From Attention "
            "to Activation, table 2).",
        ),
    ]


def sink_level(share: float) -> Level:
    """Return what a first token's share of attention means."""
    return _level(share, 0.05, 0.3)


def _level(value: float, good: float, bad: float) -> Level:
    return "good" if value <= good else "bad" if value >= bad else "mixed"


def _channel(diagnosis: Diagnosis) -> str:
    rows = block_outputs(diagnosis.rows.filter(metric="outlier_channel"))
    if rows.is_empty():
        return ""
    top = rows.group_by("variant").agg(pl.col("value").sum()).sort("value", descending=True)
    return f"; {top['variant'][0]} stands out most"


def layer_charts(diagnoses: Sequence[Diagnosis]) -> list[tuple[str, Drawing]]:
    """Return a curve over layers for each metric, all models in each, with ± one standard error."""
    return [(title, _curve(diagnoses, *curve)) for *curve, title in _CURVES]


def rank_strips(diagnoses: Sequence[Diagnosis]) -> Drawing:
    """Draw the sorted ranks of all heads, one strip a model."""
    frame = _of_all(
        diagnoses,
        lambda each: (
            head_values(each, "rank")
            .sort("value")
            .select(
                "layer", "head", "value", "kind", place=(pl.int_range(pl.len()) + 0.5) / pl.len()
            )
        ),
    )
    chart = alt.Chart(frame).mark_point(filled=True, size=22, opacity=0.75)
    chart = chart.encode(
        x=alt.X("place:Q", title="heads, sorted", axis=alt.Axis(format="%")),
        y=alt.Y("value:Q", title="rank", scale=alt.Scale(type="symlog")),
        color=_models(diagnoses),
        shape=alt.Shape("kind:N", legend=None),
        tooltip=["model:N", "layer:O", "head:O", "value:Q", "kind:N"],
    )
    return wide(chart, 240)


def spectra(diagnoses: Sequence[Diagnosis]) -> Drawing:
    """Draw the values' normalized eigenvalues, averaged over layers."""
    frame = _of_all(
        diagnoses,
        lambda each: (
            each.rows.filter(metric="value_spectrum")
            .group_by(pl.col("position").cast(pl.Int64))
            .agg(pl.col("value").mean())
            .sort("position")
        ),
    )
    chart = alt.Chart(frame).mark_line(strokeWidth=2)
    chart = chart.encode(
        x=alt.X("position:Q", title="eigenvalue, from the largest"),
        y=alt.Y("value:Q", title="ratio to the largest", scale=alt.Scale(type="log")),
        color=_models(diagnoses),
        tooltip=["model:N", "position:Q", tip("value", ".3~g")],
    )
    return wide(chart, 220)


def top_importance(diagnoses: Sequence[Diagnosis]) -> Drawing:
    """Draw the k-th largest token importance over layers."""
    frame = _of_all(
        diagnoses,
        lambda each: each.rows.filter(metric="top_importance", variant="code").select(
            "layer", "value", k="position"
        ),
    )
    chart = alt.Chart(frame).mark_line(strokeWidth=2)
    chart = chart.encode(
        x=_LAYERS,
        y=alt.Y("value:Q", title="k-th largest importance", scale=alt.Scale(type="log")),
        color=_models(diagnoses),
        strokeDash=alt.StrokeDash("k:N", sort=None, legend=alt.Legend(title="k")),
        tooltip=["model:N", "layer:Q", "k:N", tip("value", ".3~g")],
    )
    return wide(chart, 240)


def _curve(diagnoses: Sequence[Diagnosis], metric: str, variant: str, position: str) -> Drawing:
    value, error = pl.col("value"), pl.col("standard_error").fill_null(0)
    low = value - error
    if metric in _LOG:
        low = low.clip(lower_bound=value / 10)
    frame = _of_all(
        diagnoses,
        lambda each: layer_values(each, metric, variant=variant, position=position).select(
            "layer", "value", "kind", low=low, high=value + error
        ),
    )
    scale = alt.Scale(type="log") if metric in _LOG else alt.Scale()
    base = alt.Chart(frame).encode(x=_LAYERS)
    color = _models(diagnoses, legend=None)
    line = base.mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=18)).encode(
        y=alt.Y("value:Q", title=None, scale=scale),
        color=color,
        tooltip=["model:N", "layer:Q", tip("value", ",.4~g"), "kind:N"],
    )
    band = base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q"), y2="high:Q", color=color)
    return wide(alt.layer(band, line), 150)


def _of_all(
    diagnoses: Sequence[Diagnosis], rows: Callable[[Diagnosis], pl.DataFrame]
) -> pl.DataFrame:
    return pl.concat([rows(each).with_columns(model=pl.lit(each.name)) for each in diagnoses])


def _models(diagnoses: Sequence[Diagnosis], **more: Any) -> alt.Color:
    if len(diagnoses) == 1:
        more = {"legend": None}
    return colored("model", [each.name for each in diagnoses], **more)


def _heads(diagnosis: Diagnosis, metric: str, title: str) -> Drawing:
    """Draw a metric of every layer and head; a bound is marked."""
    rows = head_values(diagnosis, metric).select("layer", "head", "value", "kind")
    x = alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    y = alt.Y("head:O", title="head")
    tooltip = ["layer:O", "head:O", tip("value", ",.4~g"), "kind:N"]
    cells = heatmap(rows, x, y, "value", title, tooltip=tooltip)
    bounds = alt.Chart(rows).transform_filter(alt.datum.kind == "bound")
    marks = bounds.mark_text(text="≤", fontSize=9).encode(x=x, y=y, color=alt.value("white"))
    return wide(alt.layer(cells, marks), alt.Step(14))


def first_token_heads(diagnosis: Diagnosis) -> Drawing:
    """Draw the first-token share of every layer and head."""
    return _heads(diagnosis, "first_key_share_without_row_0", "first-token share")


def _pictures(diagnosis: Diagnosis) -> Drawing | None:
    """Draw the attention of the chosen layers and heads as small squares."""
    cells = _placed(diagnosis, "attention_picture", "query", "key", "layer", "head")
    if cells is None:
        return None
    cells = cells.with_columns(pl.col("value").sqrt())
    x, y = alt.X("key:O", axis=None), alt.Y("query:O", axis=None)
    row, column = (alt.Header(labelExpr=f"'{name} ' + datum.value") for name in ("layer", "head"))
    return (
        heatmap(cells.rename({"value": "weight"}), x, y, "weight", None)
        .properties(width=120, height=120)
        .facet(
            row=alt.Row("layer:O", title=None, header=row),
            column=alt.Column("head:O", title=None, header=column),
            spacing=6,
        )
    )


def _mean_attention(diagnosis: Diagnosis) -> Drawing | None:
    """Draw the mean attention of all heads and layers among the first positions."""
    cells = _placed(diagnosis, "mean_attention", "query", "key")
    if cells is None:
        return None
    x, y = alt.X("key:O", title="key", axis=_BARE), alt.Y("query:O", title="query", axis=_BARE)
    tooltip = ["query:O", "key:O", tip("value", ".3f")]
    chart = heatmap(cells, x, y, "value", "mean weight", type="sqrt", tooltip=tooltip)
    return chart.properties(width=300, height=300)


def _hidden(diagnosis: Diagnosis) -> Drawing | None:
    """Draw the magnitude of hidden states: positions by channel bins."""
    cells = _placed(diagnosis, "hidden_picture", "token", "channel")
    if cells is None:
        return None
    cells = cells.select("token", "channel", size=pl.col("value").log1p())
    x = alt.X("channel:O", title="channels, binned by their largest", axis=_BARE)
    y = alt.Y("token:O", title="position", axis=_BARE)
    return wide(heatmap(cells, x, y, "size", "log(1 + |x|)"), 220)


def _placed(
    diagnosis: Diagnosis, metric: str, row: str, column: str, *more: str
) -> pl.DataFrame | None:
    """Return a metric of pairs of places, which a row's position names "row,column", if any."""
    rows = diagnosis.rows.filter(metric=metric)
    place = pl.col("position").str.split(",").list
    pair = {row: place.get(0).cast(pl.Int64), column: place.get(1).cast(pl.Int64)}
    return None if rows.is_empty() else rows.select(*more, "value", **pair)


def write_diagnosis(
    diagnoses: Sequence[Diagnosis],
    path: str | Path,
    *,
    title: str,
    method: Mapping[str, Any],
    done: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write the page; an old page stays until the new one is whole.

    `done` are words and what they say of what was done to the last of several models.
    """
    figures = [summary(each) for each in diagnoses]
    return write_page(
        path,
        "diagnosis",
        title=title,
        method=method,
        done=done,
        models=[
            {
                "name": each.name,
                "lazy_layers": lazy_layers(each),
                "findings": findings(each),
                "rank": _heads(each, "rank", "rank"),
                "share": first_token_heads(each),
                "pictures": _pictures(each),
                "mean": _mean_attention(each),
                "hidden": _hidden(each),
                "channels": _channels(each),
            }
            for each in diagnoses
        ],
        compared=[
            (label, [_compared(figure[key], figures[0][key], style) for figure in figures])
            for key, label, style in _COMPARED
            if any(figure[key] is not None for figure in figures)
        ],
        colors=colors(diagnoses),
        curves=layer_charts(diagnoses),
        strips=rank_strips(diagnoses),
        spectra=spectra(diagnoses),
        top=top_importance(diagnoses),
    )


def _channels(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Return the channels that stand out in most layers, with where they are largest."""
    rows = block_outputs(diagnosis.rows.filter(metric="outlier_channel"))
    largest = pl.col("value", "layer", "position").first()
    top = (
        rows.sort("value", descending=True)
        .group_by("variant", maintain_order=True)
        .agg(largest, layers=pl.len())
        .sort("value", descending=True)
    )
    return top.head(8).to_dicts()


def _compared(value: float | None, first: float | None, style: str) -> tuple[str, str]:
    """Return a figure and, for all models but the first, its difference to the first model's."""
    if value is None:
        return "–", ""
    if first is None or value is first:
        return style.format(value), ""
    return style.format(value), style.replace("{:", "{:+").format(value - first)
