"""Charts of a diagnosis."""

from collections.abc import Sequence

import altair as alt
import polars as pl

from wakeful.evaluation.diagnosis import Diagnosis
from wakeful.pages.charts import PALETTE, Drawing
from wakeful.pages.diagnosis.findings import head_values, layer_values

CURVES = (
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
"""Metric, variant, position and axis title of each layer curve."""
_LOG = {"kurtosis", "max_activation", "residual_peak", "value_eigenvalue"}


def layer_charts(diagnoses: Sequence[Diagnosis]) -> list[tuple[str, Drawing]]:
    """Return a curve over layers for each metric, all models in each, with ± one standard error."""
    return [(title, _curve(diagnoses, *curve)) for *curve, title in CURVES]


def heatmap(diagnosis: Diagnosis, metric: str, title: str, *, variant: str = "paper") -> Drawing:
    """Draw a metric of every layer and head; a bound is marked."""
    rows = head_values(diagnosis, metric, variant=variant)
    base = alt.Chart(rows.select("layer", "head", "value", "kind")).encode(
        x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        y=alt.Y("head:O", title="head"),
    )
    cells = base.mark_rect().encode(
        color=alt.Color(
            "value:Q", scale=alt.Scale(scheme="cividis"), legend=alt.Legend(title=title)
        ),
        tooltip=["layer:O", "head:O", alt.Tooltip("value:Q", format=",.4~g"), "kind:N"],
    )
    marks = (
        base.transform_filter(alt.datum.kind == "bound")
        .mark_text(text="≤", fontSize=9)
        .encode(color=alt.value("white"))
    )
    return _wide(alt.layer(cells, marks), alt.Step(14))


def rank_strips(diagnoses: Sequence[Diagnosis]) -> Drawing:
    """Draw the sorted ranks of all heads, one strip a model."""
    frames = []
    for diagnosis in diagnoses:
        ranks = head_values(diagnosis, "rank").sort("value")
        place = (pl.int_range(pl.len()) + 0.5) / pl.len()
        frames.append(
            ranks.select(
                pl.lit(diagnosis.name).alias("model"), "layer", "head", "value", "kind",
                place.alias("place"),
            )
        )  # fmt: skip
    chart = (
        alt.Chart(pl.concat(frames))
        .mark_point(filled=True, size=22, opacity=0.75)
        .encode(
            x=alt.X("place:Q", title="heads, sorted", axis=alt.Axis(format="%")),
            y=alt.Y("value:Q", title="rank", scale=alt.Scale(type="symlog")),
            color=_models(diagnoses),
            shape=alt.Shape("kind:N", legend=None),
            tooltip=["model:N", "layer:O", "head:O", "value:Q", "kind:N"],
        )
    )
    return _wide(chart, 240)


def spectra(diagnoses: Sequence[Diagnosis]) -> Drawing:
    """Draw the values' normalized eigenvalues, averaged over layers."""
    frames = []
    for diagnosis in diagnoses:
        rows = diagnosis.rows.filter(pl.col("metric") == "value_spectrum")
        mean = rows.group_by(pl.col("position").cast(pl.Int64)).agg(pl.col("value").mean())
        frames.append(mean.select(pl.lit(diagnosis.name).alias("model"), "position", "value"))
    chart = (
        alt.Chart(pl.concat(frames))
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("position:Q", title="eigenvalue, from the largest"),
            y=alt.Y("value:Q", title="ratio to the largest", scale=alt.Scale(type="log")),
            color=_models(diagnoses),
            tooltip=["model:N", "position:Q", alt.Tooltip("value:Q", format=".3~g")],
        )
    )
    return _wide(chart, 220)


def top_importance(diagnoses: Sequence[Diagnosis]) -> Drawing:
    """Draw the k-th largest token importance over layers."""
    frames = [
        diagnosis.rows.filter(
            (pl.col("metric") == "top_importance") & (pl.col("variant") == "code")
        ).select(
            pl.lit(diagnosis.name).alias("model"), "layer", "value",
            pl.col("position").alias("k"),
        )
        for diagnosis in diagnoses
    ]  # fmt: skip
    chart = (
        alt.Chart(pl.concat(frames))
        .mark_line(strokeWidth=2)
        .encode(
            x=_layers(),
            y=alt.Y("value:Q", title="k-th largest importance", scale=alt.Scale(type="log")),
            color=_models(diagnoses),
            strokeDash=alt.StrokeDash("k:N", sort=None, legend=alt.Legend(title="k")),
            tooltip=["model:N", "layer:Q", "k:N", alt.Tooltip("value:Q", format=".3~g")],
        )
    )
    return _wide(chart, 240)


def pictures(diagnosis: Diagnosis) -> Drawing | None:
    """Draw the attention of the chosen layers and heads as small squares."""
    rows = diagnosis.rows.filter(pl.col("metric") == "attention_picture")
    if rows.is_empty():
        return None
    cells = rows.select(
        "layer", "head", *_places("query", "key"), pl.col("value").sqrt().alias("weight")
    )
    return (
        alt.Chart(cells)
        .mark_rect()
        .encode(
            x=alt.X("key:O", axis=None),
            y=alt.Y("query:O", axis=None),
            color=alt.Color("weight:Q", scale=alt.Scale(scheme="cividis"), legend=None),
        )
        .properties(width=120, height=120)
        .facet(
            row=alt.Row(
                "layer:O", title=None, header=alt.Header(labelExpr="'layer ' + datum.value")
            ),
            column=alt.Column(
                "head:O", title=None, header=alt.Header(labelExpr="'head ' + datum.value")
            ),
            spacing=6,
        )
    )


def mean_attention(diagnosis: Diagnosis) -> Drawing | None:
    """Draw the mean attention of all heads and layers among the first positions."""
    rows = diagnosis.rows.filter(pl.col("metric") == "mean_attention")
    if rows.is_empty():
        return None
    cells = rows.select(*_places("query", "key"), "value")
    return (
        alt.Chart(cells)
        .mark_rect()
        .encode(
            x=alt.X("key:O", title="key", axis=_few()),
            y=alt.Y("query:O", title="query", axis=_few()),
            color=alt.Color(
                "value:Q",
                scale=alt.Scale(scheme="cividis", type="sqrt"),
                legend=alt.Legend(title="mean weight"),
            ),
            tooltip=["query:O", "key:O", alt.Tooltip("value:Q", format=".3f")],
        )
        .properties(width=300, height=300)
    )


def hidden_picture(diagnosis: Diagnosis) -> Drawing | None:
    """Draw the magnitude of hidden states: positions by channel bins."""
    rows = diagnosis.rows.filter(pl.col("metric") == "hidden_picture")
    if rows.is_empty():
        return None
    cells = rows.select(*_places("token", "channel"), pl.col("value").log1p().alias("size"))
    chart = (
        alt.Chart(cells)
        .mark_rect()
        .encode(
            x=alt.X("channel:O", title="channels, binned by their largest", axis=_few()),
            y=alt.Y("token:O", title="position", axis=_few()),
            color=alt.Color(
                "size:Q", scale=alt.Scale(scheme="cividis"), legend=alt.Legend(title="log(1 + |x|)")
            ),
        )
    )
    return _wide(chart, 220)


def _curve(diagnoses: Sequence[Diagnosis], metric: str, variant: str, position: str) -> Drawing:
    frames = [
        layer_values(diagnosis, metric, variant=variant, position=position).select(
            pl.lit(diagnosis.name).alias("model"), "layer", "value", "kind",
            (pl.col("value") - pl.col("standard_error").fill_null(0)).alias("low"),
            (pl.col("value") + pl.col("standard_error").fill_null(0)).alias("high"),
        )
        for diagnosis in diagnoses
    ]  # fmt: skip
    frame = pl.concat(frames)
    scale = alt.Scale(type="log") if metric in _LOG else alt.Scale()
    if metric in _LOG:
        frame = frame.with_columns(pl.col("low").clip(lower_bound=pl.col("value") / 10))
    base = alt.Chart(frame).encode(x=_layers())
    hidden = alt.Color("model:N", scale=_scale(diagnoses), legend=None)
    y = alt.Y("value:Q", title=None, scale=scale)
    line = base.mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=18)).encode(
        y=y,
        color=hidden,
        tooltip=["model:N", "layer:Q", alt.Tooltip("value:Q", format=",.4~g"), "kind:N"],
    )
    band = base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q"), y2="high:Q", color=hidden)
    return _wide(alt.layer(band, line), 150)


def _wide(chart: Drawing, height: int | alt.Step) -> Drawing:
    autosize = alt.AutoSizeParams(type="fit-x", contains="padding")
    return chart.properties(width="container", height=height, autosize=autosize)


def _places(row: str, column: str) -> list[pl.Expr]:
    pair = pl.col("position").str.split(",")
    return [
        pair.list.get(0).cast(pl.Int64).alias(row),
        pair.list.get(1).cast(pl.Int64).alias(column),
    ]


def _layers() -> alt.X:
    """Return an axis from the first layer, the embedding's −1 or 0, to the last."""
    return alt.X(
        "layer:Q",
        title="layer",
        scale=alt.Scale(nice=False, zero=False, padding=6),
        axis=alt.Axis(tickMinStep=1, format="d"),
    )


def _few() -> alt.Axis:
    return alt.Axis(labels=False, ticks=False)


def _scale(diagnoses: Sequence[Diagnosis]) -> alt.Scale:
    names = [diagnosis.name for diagnosis in diagnoses]
    return alt.Scale(domain=names, range=[PALETTE[n % len(PALETTE)] for n in range(len(names))])


def _models(diagnoses: Sequence[Diagnosis]) -> alt.Color:
    if len(diagnoses) == 1:
        return alt.Color("model:N", scale=_scale(diagnoses), legend=None)
    return alt.Color("model:N", scale=_scale(diagnoses))
