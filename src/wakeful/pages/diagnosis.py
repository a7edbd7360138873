"""A diagnosis drawn: its charts, and one offline HTML page."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl

from wakeful.estimates import finite, to_error, with_error
from wakeful.evaluation.diagnosis import Diagnosis
from wakeful.evaluation.findings import (
    findings,
    head_values,
    layer_values,
    lazy_layers,
    suggested_depth,
    summary,
)
from wakeful.pages.charts import (
    DASHES,
    RANKS,
    SHARE,
    WHOLE,
    Drawing,
    colored,
    colors,
    dashed,
    dashes,
    nearest,
    opacity,
    rounded,
    shaped,
    switchable,
    tip,
    tips,
    unchecked,
    wide,
)
from wakeful.pages.heads import (
    MAPS,
    attention,
    head_map,
    hidden,
    maps,
    mean_attention,
    pictures,
    sink,
)
from wakeful.pages.page import Step, listed, rough, write_page
from wakeful.pages.terms import explained
from wakeful.probes.base import block_outputs, mean_over_layers

_SHARE = "first_key_share_without_row_0"
_COMPARED = (
    ("loss", "loss (nats)"),
    (_SHARE, "first-token share, without row 0"),
    ("first_key_share_with_row_0", "first-token share, with row 0"),
    ("first_key_mass_without_row_0", "first-token mass, without row 0"),
    ("first_key_mass_with_row_0", "first-token mass, with row 0"),
    ("stored_prefix_mass", "mass on the stored prefix"),
    ("entropy", "entropy (nats)"),
    ("median_head_rank", "median head rank"),
    ("heads_near_rank_1", "heads near rank 1"),
    ("value_drain_lowest", "lowest value drain"),
    ("kurtosis_first", "kurtosis, first"),
    ("kurtosis_rest", "kurtosis, rest"),
    ("max_activation_first", "mean max |x|, first"),
    ("max_activation_rest", "mean max |x|, rest"),
)
_COUNTED = {"median_head_rank", "heads_near_rank_1"}
"""Figures that have no error over sequences."""
_CURVES = (
    (_SHARE, "paper", "all", "share of pairs led by key 0, without row 0"),
    ("rank", "paper", "all", "largest head rank"),
    ("value_drain", "paper", "first", "‖v₀‖ over the others' mean"),
    ("residual_peak", "paper", "first", "‖h₀‖ over the others' mean"),
    ("kurtosis", "paper", "first", "kurtosis, first token"),
    ("kurtosis", "paper", "rest", "kurtosis, the rest"),
    ("first_key_mass_without_row_0", "paper", "all", "attention mass on key 0, without row 0"),
    ("entropy", "code", "all", "entropy of importance (nats)"),
    ("mass_columns", "paper", "all", "columns holding the mass"),
    ("value_eigenvalue", "paper", "1", "largest value eigenvalue"),
    ("max_activation", "paper", "first", "mean max |x|, first token"),
    ("max_activation", "paper", "rest", "mean max |x|, the rest"),
    ("token_similarity", "paper", "all", "token similarity (cosine)"),
    ("block_influence", "paper", "all", "block influence"),
    ("angular_distance", "paper", "last", "angular distance (of π)"),
)
"""Metric, variant, position and title of each curve over layers."""
_FIRST = 6
"""Curves that the page shows before its details."""
_READ, _READ_OF_MANY = 60, 24
"""Tokens of the text that the page quotes, of one model and of several."""
_RANKS = {"rank", "mass_columns"}
_FEW_RANKS = (1, 10, 100, 1000, 10000)
_LOG = {"kurtosis", "max_activation", "residual_peak", "value_eigenvalue"}
_LOG_LABELS = "format(datum.value, datum.value < 1 ? '~g' : '~s')"
_LAYERS = alt.X(
    "layer:Q", title="layer", scale=alt.Scale(nice=False, zero=False, padding=6),
    axis=alt.Axis(tickMinStep=1, format="d", labelExpr=WHOLE),
)  # fmt: skip
"""From the first layer, the embedding's −1 or 0, to the last."""
_KS = alt.Legend(title="k", symbolType="stroke", columns=5)


def layer_charts(diagnoses: Sequence[Diagnosis]) -> list[tuple[str, Drawing]]:
    """Return a curve over layers for each metric, all models in each, with ± one standard error."""
    return [
        (title, _curve(diagnoses, metric, variant, position, title))
        for metric, variant, position, title in _CURVES
    ]


def diagnosis_figures(diagnoses: Sequence[Diagnosis]) -> list[tuple[str, Drawing]]:
    """Return every chart of the page with a title of its own, for a paper."""
    longest = max(each.length for each in diagnoses)
    return [
        *((f"{title}, over layers", chart) for title, chart in layer_charts(diagnoses)),
        ("Sorted ranks of all heads", rank_strips(diagnoses)),
        ("Normalized eigenvalues of the values, mean over layers", spectra(diagnoses)),
        ("Largest token importances over layers", top_importance(diagnoses)),
        *(
            (f"{title} of {each.name}", chart)
            for each in diagnoses
            for title, chart in (
                *((title[0].upper() + title[1:], map_) for title, _, map_ in maps(each, longest)),
                ("Attention of the strongest sink head", attention(each, "sinks")),
                ("Attention of the head of the highest rank", attention(each, "widest")),
                ("Attention of a head over whole sequences", pictures(each)),
                ("Mean attention of all heads and layers", mean_attention(each)),
                ("Hidden-state magnitude", hidden(each)),
            )
            if chart is not None
        ),
    ]


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
    longest = max(each.length for each in diagnoses)
    ticks = [rank for rank in RANKS if rank <= longest]
    base = alt.Chart(rounded(frame, 4)).encode(
        x=alt.X("place:Q", title="heads, sorted", axis=alt.Axis(format="%", tickCount=5)),
        color=_models(diagnoses, legend=None),
    )
    y = alt.Y("value:Q", title="rank", scale=alt.Scale(type="log", domain=(1, longest), clamp=True),
              axis=alt.Axis(values=ticks))  # fmt: skip
    points = base.mark_point(filled=True, size=26)
    points = points.encode(
        y=y, shape=shaped("model", _names(diagnoses), legend=None), opacity=opacity("model", 0.75)
    )
    tooltip = tips("model:N", "layer:O", "head:O", "value:Q", "kind:N")
    return wide(switchable(alt.layer(points, nearest(base, tooltip, y))), 240)


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
    frame = _positive(frame)
    x = alt.X("position:Q", title="eigenvalue, from the largest")
    y = alt.Y("value:Q", title="ratio to the largest", scale=alt.Scale(type="log"),
              axis=alt.Axis(format="~g", tickCount=4))  # fmt: skip
    return wide(_lines(diagnoses, frame, x, y, ["position:Q"], ".3~g"), 220)


def top_importance(diagnoses: Sequence[Diagnosis]) -> Drawing:
    """Draw the k-th largest token importances over layers, a dash a k; of several models, which
    have dashes of their own, the largest alone.
    """
    frame = _of_all(
        diagnoses,
        lambda each: each.rows.filter(metric="top_importance", variant="code").select(
            "layer", "value", k=pl.col("position").cast(pl.Int64)
        ),
    )
    frame = _positive(frame)
    many = len(diagnoses) > 1
    title = "largest importance" if many else "k-th largest importance"
    y = alt.Y("value:Q", title=title, scale=alt.Scale(type="log"),
              axis=alt.Axis(format="~g", tickCount=4))  # fmt: skip
    if many:
        first = frame.filter(k=1).drop("k")
        return wide(_lines(diagnoses, first, _LAYERS, y, ["layer:Q"], ".3~g"), 240)
    ks = sorted(frame["k"].unique())
    scale = alt.Scale(domain=ks, range=list(DASHES[: len(ks)]))
    base = alt.Chart(rounded(frame, 4)).encode(x=_LAYERS, color=_models(diagnoses, legend=None))
    dash = alt.StrokeDash("k:O", scale=scale, legend=_KS)
    lines = base.mark_line(strokeWidth=2).encode(y=y, strokeDash=dash)
    tooltip = [*tips("model:N", "layer:Q", "k:O"), tip("value", ".3~g")]
    return wide(alt.layer(lines, nearest(base, tooltip, y)), 240)


def _curve(
    diagnoses: Sequence[Diagnosis], metric: str, variant: str, position: str, title: str
) -> Drawing:
    value, error = pl.col("value"), pl.col("standard_error").fill_null(0)
    low, high = value - error, value + error
    if metric in _LOG:
        low = low.clip(lower_bound=value / 10)
    elif metric.startswith("first_key"):
        low, high = low.clip(*SHARE), high.clip(*SHARE)
    frame = _of_all(
        diagnoses,
        lambda each: layer_values(each, metric, variant=variant, position=position).select(
            "layer", "value", "kind", low=low, high=high
        ),
    )
    scale, axis = alt.Scale(), alt.Axis(tickCount=4)
    if metric in _LOG:
        frame = _positive(frame)
        scale, axis = alt.Scale(type="log"), alt.Axis(labelExpr=_LOG_LABELS, tickCount=3)
    elif metric.startswith("first_key"):
        scale = alt.Scale(domain=SHARE)
    elif metric in _RANKS:
        longest = max(each.length for each in diagnoses)
        scale = alt.Scale(type="log", domain=(1, longest), clamp=True)
        axis = alt.Axis(values=[rank for rank in _FEW_RANKS if rank <= longest])
    y = alt.Y("value:Q", title=None, scale=scale, axis=axis)
    return wide(_lines(diagnoses, frame, _LAYERS, y, ["layer:Q", "kind:N"], ",.4~g", title), 150)


def _lines(
    diagnoses: Sequence[Diagnosis], frame: pl.DataFrame, x: alt.X, y: alt.Y, fields: Sequence[str],
    style: str, title: str = "",
) -> alt.LayerChart:  # fmt: skip
    """Draw a line a model, by color and dash, with a band where the frame has low and high."""
    base = alt.Chart(rounded(frame, 5)).encode(x=x, color=_models(diagnoses, legend=None))
    dash = dashed("model", _names(diagnoses), dashes(diagnoses), legend=None)
    lines = base.mark_line(strokeWidth=1.8).encode(y=y, strokeDash=dash, opacity=opacity("model"))
    named = {"title": title} if title else {}
    tooltip = [*tips("model:N", *fields), tip("value", style, **named)]
    layers = [lines, nearest(base, tooltip, y)]
    if "low" in frame.columns and frame["high"].ne_missing(frame["low"]).any():
        band = base.mark_area().encode(
            y=alt.Y("low:Q"), y2=alt.Y2("high:Q"), opacity=opacity("model", 0.2)
        )
        layers.insert(0, band)
    return switchable(alt.layer(*layers))


def _names(diagnoses: Sequence[Diagnosis]) -> list[str]:
    return [each.name for each in diagnoses]


def _of_all(
    diagnoses: Sequence[Diagnosis], rows: Callable[[Diagnosis], pl.DataFrame]
) -> pl.DataFrame:
    return pl.concat([rows(each).with_columns(model=pl.lit(each.name)) for each in diagnoses])


def _positive(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows that a logarithmic axis has a place for: a zero would flatten all others."""
    return frame.filter(pl.col("value") > 0)


def _models(diagnoses: Sequence[Diagnosis], **more: Any) -> alt.Color:
    return colored("model", _names(diagnoses), **more)


def first_token_heads(diagnosis: Diagnosis) -> Drawing:
    """Draw the first-token share of every layer and head."""
    return head_map(diagnosis, next(each for each in MAPS if each.metric == _SHARE))


def headlines(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """Return the verdicts, a sentence for all models of which the same is to be said."""
    said: dict[str, list[str]] = {}
    for each in diagnoses:
        said.setdefault(_ills(each), []).append(each.name)
    return [
        f"{listed(names)} {'have' if len(names) > 1 else 'has'} {ills}."
        if ills
        else f"{listed(names)} {'are' if len(names) > 1 else 'is'} healthy: no sinks, lazy layers, "
        "drained values or outliers."
        for ills, names in said.items()
    ]


def _ills(diagnosis: Diagnosis) -> str:
    words = {"bad": "strong ", "mixed": "some "}
    ills = {
        "Attention sinks": "attention sinks", "Lazy layers": "lazy heads",
        "Drained values": "drained values", "Outlier activations": "outliers",
    }  # fmt: skip
    found = [
        words[each.level] + ("lazy layers" if lazy_layers(diagnosis) and each.title == "Lazy layers"
        else ills[each.title])
        for each in findings(diagnosis) if each.level != "good"
    ]  # fmt: skip
    return listed(found) if found else ""


def next_steps(diagnoses: Sequence[Diagnosis], sources: Sequence[str]) -> list[Step]:
    """Return what to do about what was found; what is healthy is quantized together."""
    found = [_cure(each, source) for each, source in zip(diagnoses, sources, strict=True)]
    healthy = [n for n, step in enumerate(found) if step is None]
    steps = [step for step in found if step is not None]
    if healthy:
        names = listed(diagnoses[n].name for n in healthy)
        models = " ".join(shlex.quote(sources[n]) for n in healthy)
        steps.append(Step(f"nothing to cure in {names}; see what quantization does",
                          f"wakeful quantize {models}"))  # fmt: skip
    return steps


def _cure(diagnosis: Diagnosis, source: str) -> Step | None:
    levels = {each.title: each.level for each in findings(diagnosis)}
    model = shlex.quote(source)
    depth = suggested_depth(diagnosis)
    prefix = "bos" if diagnosis.has_bos else "1"  # the token that a text shows to be best
    if levels["Attention sinks"] != "good":
        return Step(f"move {diagnosis.name}'s sink out of the text and rotate its outliers away",
                    f"wakeful cure {model} --rotate hadamard --prefix {prefix}")  # fmt: skip
    if levels["Lazy layers"] == "bad" and depth < diagnosis.num_layers:
        return Step(f"train a model with the {depth} layers of {diagnosis.name} that work",
                    f"wakeful inherit {model} --layers {depth}")  # fmt: skip
    if levels["Outlier activations"] != "good":
        return Step(
            f"rotate {diagnosis.name}'s outliers away", f"wakeful cure {model} --rotate hadamard"
        )
    return None


def after_cure(source: str, folder: str | Path) -> list[Step]:
    """Return what to do with a cured model in a folder and the model that it was made of."""
    before, after = shlex.quote(source), shlex.quote(str(folder))
    return [
        Step("compare it with the original on text", f"wakeful evaluate {before} {after}"),
        Step("see what quantization costs each of them", f"wakeful quantize {before} {after}"),
    ]


@unchecked
def write_diagnosis(
    diagnoses: Sequence[Diagnosis],
    path: str | Path,
    *,
    title: str,
    method: Mapping[str, Any],
    done: Sequence[tuple[str, str]] = (),
    sources: Sequence[str] = (),
    steps: Sequence[Step] | None = None,
) -> Path:
    """Write the page; an old page stays until the new one is whole.

    `done` are words and what they say of what was done to the last of several models; `sources`
    are what the models were asked for as, for a command to type; `steps` are what to do next, where
    that is not to cure what was found.
    """
    figures = [summary(each) for each in diagnoses]
    measured = [(one, _errors(each)) for one, each in zip(figures, diagnoses, strict=True)]
    named = sources if len(sources) == len(diagnoses) else _names(diagnoses)
    longest = max(each.length for each in diagnoses)
    curves = layer_charts(diagnoses)
    many = len(diagnoses) > 1
    texts = ["".join(each.tokens[: _READ_OF_MANY if many else _READ]) for each in diagnoses]
    return write_page(
        path,
        "diagnosis",
        title=title,
        method=method,
        headlines=headlines(diagnoses),
        steps=next_steps(diagnoses, named) if steps is None else steps,
        done=done,
        models=[
            {
                "name": each.name,
                "findings": findings(each),
                "maps": maps(each, longest),
                "sink": sink(each),
                "read": text,
                "attention": attention(each, "sinks, then widest" if many else "sinks"),
                "widest": None if many else attention(each, "widest"),
                "pictures": pictures(each),
                "mean": mean_attention(each),
                "hidden": hidden(each),
                "channels": _channels(each),
            }
            for each, text in zip(diagnoses, texts, strict=True)
        ],
        same_text=many and len(set(texts)) == 1,
        compared=[
            (
                label,
                explained(key),
                _compared(key, [(one[key], errors.get(key)) for one, errors in measured]),
            )
            for key, label in _COMPARED
            if any(figure[key] is not None for figure in figures)
        ],
        colors=colors(diagnoses),
        dashes=dashes(diagnoses),
        shown=curves[:_FIRST],
        rest=curves[_FIRST:],
        explained={
            title: explained(f"{metric}_{position}") for metric, _, position, title in _CURVES
        },
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


def _errors(diagnosis: Diagnosis) -> dict[str, float | None]:
    """Return what the figures' errors are at most, over sequences: layers move together at worst,
    and the error of their mean is then the mean of their errors.
    """

    def mean(metric: str, **where: str) -> float | None:
        rows = layer_values(diagnosis, metric, **where).with_columns(value=pl.col("standard_error"))
        return mean_over_layers(rows.drop_nulls("value"))

    drain = layer_values(diagnosis, "value_drain", position="first").sort("value")
    alike = [key for key, _ in _COMPARED if key.startswith(("first_key", "stored_prefix"))]
    return {
        "loss": finite(diagnosis.loss_error),
        "entropy": mean("entropy", variant="code"),
        "value_drain_lowest": next(iter(drain["standard_error"].to_list()), None),
        **{key: mean(key) for key in alike},
        **{
            f"{metric}_{position}": mean(metric, position=position)
            for metric in ("kurtosis", "max_activation")
            for position in ("first", "rest")
        },
    }


def _compared(
    key: str, known: Sequence[tuple[float | None, float | None]]
) -> list[tuple[str, str]]:
    """Return every model's figure with its error and, for all but the first, its difference to the
    first's, to the digits that the error of both leaves it.
    """
    base, base_error = known[0]
    told: list[tuple[str, str]] = []
    for value, error in known:
        if value is None:
            told.append(("–", ""))
            continue
        change = value - (value if base is None else base)
        shown, gap = rough(value), f"{'−' if change < 0 else '+'}{rough(abs(change))}"
        if key in _COUNTED:
            shown, gap = f"{value:.4g}", f"{change:+.3g}".replace("-", "−")
        elif error:
            both = math.hypot(error, base_error or 0.0)
            shown, gap = with_error(value, error), to_error(change, both, "+")
        told.append((shown, gap if change else ""))
    return told
