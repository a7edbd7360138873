"""What an inheritance says: plain words, charts, and one offline HTML page."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import altair as alt
import polars as pl

from wakeful.estimates import mean_and_error, with_error
from wakeful.heirs.layers import written
from wakeful.heirs.outcome import (
    Arm,
    Behind,
    Footprint,
    Reference,
    Sizes,
    Summary,
    read_inheritance,
)
from wakeful.pages.charts import (
    PALETTE,
    RANKS,
    Drawing,
    colored,
    colors,
    dashed,
    dashes,
    readable_lines,
    tip,
    tips,
    unchecked,
)
from wakeful.pages.lineage import (
    adapters,
    bridged,
    left_out,
    narrowed,
    objective,
    predictions,
)
from wakeful.pages.page import Step, write_page
from wakeful.pages.terms import explained

_FIGURES = {
    "rank": "largest head rank",
    "mass": "columns holding the mass",
    "influence": "block influence",
    "angle": "angular distance (of π)",
}
"""Figures that layers are chosen by, and their axis titles."""
_SIZES = (
    ("parameters", "parameters", "{:,.0f}", 1.0),
    ("weight_bytes", "weights, MB", "{:,.1f}", 1e-6),
    ("cache_bytes_per_token", "key/value cache, B a token", "{:,.0f}", 1.0),
    ("cache_bytes", "key/value cache of a whole context, MB", "{:,.2f}", 1e-6),
    ("tokens_per_second", "generation, tokens a second", "", 1.0),
)


def verdicts(summary: Summary) -> list[str]:
    """Return the outcome in sentences: parity, the baselines, what it saved."""
    heir, reference = summary.heir, summary.reference
    return [
        _parity(summary, heir, reference),
        *_against_baselines(summary, heir),
        _saved(summary.sizes),
    ]


def _cost(reference: Reference) -> str:
    """Say what the reference's own training took, which no baseline here pays."""
    if reference.tokens is None:
        return (
            f"What training {reference.name} cost is not known: its files do not say. An heir "
            "builds on that cost; a model trained from random does not."
        )
    seconds = reference.seconds or 0.0
    return (
        f"{reference.name} itself was trained on {reference.tokens:,} tokens in "
        f"{seconds:,.0f} s, on which an heir builds and a model trained from random does not."
    )


def _choice(summary: Summary) -> str:
    """Say which layers were taken first, and why those."""
    chosen, total = summary.choice, summary.reference.layers
    why = {
        "first": "the first layers, as the paper does",
        "middle": "layers around the middle",
        "last": "the last layers",
        "alternate": "every second layer, as DistilBERT does",
        "stacked": "the first layers, twice",
        "named": "the layers that were named",
        "rank": "the layers whose heads have the highest rank",
        "mass": "the layers whose attention is spread over the most columns",
        "influence": "the layers that change the stream most, 1 − cos(x_in, x_out)",
        "angle": "all but the neighboring layers over which the stream turns least, ends kept",
        "bridge": "all but the neighboring layers without which, bridged, the loss was least",
        "lazy": "the neighboring layers of the lowest mean rank",
    }.get(chosen.rule, chosen.rule)
    recipe = summary.recipe
    said = [
        f"{len(chosen.layers)} of {total} layers ({written(chosen.layers)}): {why}.",
        left_out(recipe.drops),
        narrowed(summary.heir.width, recipe.bridge),
    ]
    return " ".join(filter(None, said))


def _lesson(summary: Summary) -> str:
    """Say what the heirs learn from."""
    heal = summary.recipe.heal
    if heal.by == "text":
        return f"heirs learn from the text alone, by cross-entropy{adapters(heal.lora)}"
    return (
        f"heirs learn from the reference's {predictions(heal)}, "
        f"{objective(heal, 'reference', 'heir')}{adapters(heal.lora)}; "
        "baselines as their names say, by cross-entropy unless they distill"
    )


def _parity(summary: Summary, heir: Arm, reference: Reference) -> str:
    gap = with_error(abs(heir.minus_reference), heir.minus_reference_error)
    begins = (
        f"{heir.arm}, {heir.depth} of {reference.layers} layers, ends at "
        f"{with_error(heir.loss, heir.standard_error)} nats a token after {heir.tokens:,} tokens"
        f"{_grown(summary)}; {reference.name} itself has "
        f"{with_error(reference.loss, reference.standard_error)} on the same text"
    )
    if heir.parity:
        return f"{begins}: parity is reached, {gap} under it."
    outlook = summary.outlook
    times, slope = outlook.times_the_tokens, outlook.nats_per_doubling
    if times is not None:
        rest = (
            f" At the pace of its last evaluations ({slope:.3f} nats a doubling of the tokens) a "
            f"straight line reaches it at {times:,.1f} times the tokens; curves flatten, so more."
        )
    elif slope is not None and slope > 0:
        rest = (
            f" Its last evaluations gain {slope:.3f} nats a doubling of the tokens: at that pace "
            "more than a thousand times the tokens."
        )
    else:
        rest = " Its last evaluations do not say what more training would bring."
    return f"{begins}: it is {gap} short of parity.{rest}"


def _grown(summary: Summary) -> str:
    """Say what all rounds took where each began from the reference; nothing of one round."""
    heir, rounds = summary.heir, sum(arm.heir for arm in summary.arms)
    if rounds < 2:
        return ""
    return f" ({heir.all_tokens:,} in {heir.all_steps:,} steps over all {rounds} rounds of growth)"


def _against_baselines(summary: Summary, heir: Arm) -> list[str]:
    said = []
    for arm in summary.arms:
        if arm.heir:
            continue
        difference = with_error(arm.minus_heir, arm.minus_heir_error, "+")
        behind = arm.behind or Behind(0, 0)
        said.append(f"{arm.arm}: {difference} nats against {heir.arm}{_how_often(behind)}.")
    return said


def _how_often(behind: Behind) -> str:
    """Return in how many evaluations after the first step; nothing where there are none."""
    if not behind.evaluations:
        return ""
    if not behind.behind:
        often = "never behind it"
    elif behind.behind < behind.evaluations:
        often = f"behind it at {behind.behind} of {behind.evaluations} evaluations"
    elif behind.evaluations == 1:
        often = "behind it at the only evaluation"
    else:
        often = f"behind it at all {behind.evaluations} evaluations"
    return f", {often} after the first step"


def _saved(sizes: Sizes) -> str:
    ours, theirs = sizes.heir, sizes.reference
    return (
        f"It has {ours.parameters / theirs.parameters:.1%} of the reference's parameters, "
        f"{ours.cache_bytes_per_token / theirs.cache_bytes_per_token:.1%} of its key/value "
        f"cache, and writes {_times_as_fast(sizes)} times as fast."
    )


def _speed(one: Footprint) -> str:
    """Return tokens a second with their error over the rounds."""
    return with_error(one.tokens_per_second, mean_and_error(one.speeds)[1])


def _times_as_fast(sizes: Sizes) -> str:
    """Return the ratio of the speeds, with its error over the rounds."""
    ours, theirs = sizes.heir, sizes.reference
    ratio = ours.tokens_per_second / theirs.tokens_per_second
    pairs = zip(ours.speeds, theirs.speeds, strict=True)
    return with_error(ratio, mean_and_error([mine / other for mine, other in pairs])[1])


def headline(summary: Summary) -> str:
    """Return whether the heir reached parity, in a sentence."""
    heir, reference = summary.heir, summary.reference
    gap = with_error(abs(heir.minus_reference), heir.minus_reference_error)
    depth = f"{heir.depth} of {reference.layers} layers"
    if heir.parity:
        return f"{heir.arm} reaches parity with {reference.name} with {depth}."
    return f"{heir.arm}, with {depth}, is {gap} nats short of {reference.name}."


@unchecked
def write_inheritance(path: str | Path, page: str | Path = "") -> Path:
    """Write the page about an inheritance's folder; an old page stays until the new is whole."""
    summary, environment = read_inheritance(path)
    return write_page(
        page or Path(path) / "report.html",
        "inheritance",
        title=f"Inherited from {summary.reference.name}",
        summary=summary,
        environment=environment,
        heir=summary.heir,
        headlines=[headline(summary)],
        steps=[
            Step(
                f"look inside {summary.heir.arm}",
                f"wakeful diagnose {shlex.quote(str(Path(path) / summary.heir.runs[-1]))}",
            )
        ],
        verdicts=verdicts(summary),
        cost=_cost(summary.reference),
        choice=_choice(summary),
        bridges=[bridged(one, summary.recipe.bridge) for one in summary.choice.bridges],
        lesson=_lesson(summary),
        curves=loss_curves(summary),
        figures=_chosen_by(summary),
        explained={title: explained(name) for name, title in _FIGURES.items()},
        colors=colors(summary.arms),
        sizes=[_size(summary.sizes, *size) for size in _SIZES],
        written=written,
    )


def inheritance_figures(summary: Summary) -> list[tuple[str, Drawing]]:
    """Return every chart of the page with a title for a paper."""
    return [
        ("Validation loss over training steps", loss_curves(summary)),
        *((f"{title} of each layer", chart) for title, chart in _chosen_by(summary)),
    ]


def _chosen_by(summary: Summary) -> list[tuple[str, Drawing]]:
    kept = set(summary.choice.layers)
    return [
        (_FIGURES[name], _bars(values, kept, _FIGURES[name]))
        for name, values in summary.choice.figures.items()
        if name in _FIGURES
    ]


def loss_curves(summary: Summary) -> Drawing:
    """Draw validation losses over steps, the reference's as a line across (fig. 5)."""
    names = [arm.arm for arm in summary.arms]
    rows = [
        {"arm": arm.arm, "run": point.run, "step": point.step, "loss": point.loss}
        for arm in summary.arms
        for point in arm.curve
    ]
    frame = pl.DataFrame(rows)
    stroke = alt.Legend(symbolType="stroke")
    lines = readable_lines(
        frame,
        "arm",
        alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=8, tickMinStep=1)),
        alt.Y("loss:Q", title="validation loss (nats a token)", scale=alt.Scale(zero=False)),
        [*tips("arm:N", "run:N", "step:Q"), tip("loss", ".4f")],
        "step",
        colored("arm", names, legend=stroke),
        dashed("arm", names, dashes(names), legend=stroke),
        points=True,
        detail="run:N",
    )
    reference = summary.reference
    across = alt.Chart(pl.DataFrame({"loss": [reference.loss], "name": [reference.name]}))
    rule = across.mark_rule(strokeWidth=1.5, strokeDash=[5, 4]).encode(y=alt.Y("loss:Q"))
    label = across.mark_text(align="right", baseline="bottom", dy=-3)
    label = label.encode(y=alt.Y("loss:Q"), x=alt.value("width"), text=alt.Text("name:N"))
    chart = alt.layer(rule, label, *lines).properties(height=360, width="container")
    return chart.resolve_legend(color="independent", strokeDash="independent")


def _bars(values: Sequence[float], kept: set[int], title: str) -> Drawing:
    """Draw a figure that every layer had before the choice; kept layers are marked."""
    layers = range(len(values))
    frame = pl.DataFrame(
        {
            "layer": layers,
            "value": [float(value) for value in values],
            "layers": ["kept" if layer in kept else "left out" for layer in layers],
        }
    )
    names = ["kept", "left out"]
    edges = alt.Scale(domain=names, range=[PALETTE[0], PALETTE[7]])
    fills = alt.Scale(domain=names, range=[PALETTE[0], "transparent"])  # not by color alone
    axis = alt.Axis(labelAngle=0, values=list(layers[::5]))
    y = alt.Y("value:Q", title=title)
    chart = alt.Chart(frame).mark_bar(strokeWidth=1.5)
    if title in (_FIGURES["rank"], _FIGURES["mass"]):
        # Logarithmic, as in a diagnosis; a bar of rank 1 would have no length there.
        longest = max(2.0, *values)
        y = alt.Y("value:Q", title=title, axis=alt.Axis(values=[n for n in RANKS if n <= longest]),
                  scale=alt.Scale(type="log", domain=(1, longest)))  # fmt: skip
        chart = alt.Chart(frame).mark_point(size=70, strokeWidth=1.5, opacity=1)
    chart = chart.encode(
        x=alt.X("layer:O", title="layer", axis=axis),
        y=y,
        fill=alt.Fill("layers:N", scale=fills),
        stroke=alt.Stroke("layers:N", scale=edges),
        tooltip=[alt.Tooltip("layer:O"), tip("value", ".4~g"), alt.Tooltip("layers:N")],
    )
    return chart.properties(height=150, width="container")


def _size(sizes: Sizes, key: str, title: str, style: str, unit: float) -> tuple[str, list[str]]:
    ours, theirs = getattr(sizes.heir, key), getattr(sizes.reference, key)
    ratio = f"{ours / theirs:.3f}" if theirs else "–"
    if key == "tokens_per_second":
        return title, [_speed(sizes.reference), _speed(sizes.heir), _times_as_fast(sizes)]
    return title, [style.format(theirs * unit), style.format(ours * unit), ratio]
