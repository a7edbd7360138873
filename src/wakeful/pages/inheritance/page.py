"""An inheritance's charts, and the offline HTML page about it."""

from collections.abc import Sequence
from pathlib import Path

import altair as alt
import polars as pl

from wakeful.growth.layers import written
from wakeful.growth.outcome import Sizes, Summary
from wakeful.pages.charts import DASHES, PALETTE, Drawing, colored, colors, dashed, tip
from wakeful.pages.inheritance.reading import (
    choice,
    cost_of_reference,
    read_inheritance,
    verdicts,
)
from wakeful.pages.page import write_page

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
    ("tokens_per_second", "generation, tokens a second", "{:,.1f}", 1.0),
)


def write_inheritance(path: str | Path, page: str | Path = "") -> Path:
    """Write the page about an inheritance's folder; an old page stays until the new is whole."""
    summary, environment = read_inheritance(path)
    kept = set(summary.choice.layers)
    return write_page(
        page or Path(path) / "report.html",
        "inheritance",
        title=f"Inherited from {summary.reference.name}",
        summary=summary,
        environment=environment,
        heir=summary.heir,
        verdicts=verdicts(summary),
        cost=cost_of_reference(summary.reference),
        choice=choice(summary),
        curves=loss_curves(summary),
        figures=[
            (_FIGURES[name], _bars(values, kept, _FIGURES[name]))
            for name, values in summary.choice.figures.items()
            if name in _FIGURES
        ],
        colors=colors(summary.arms),
        sizes=[_size(summary.sizes, *size) for size in _SIZES],
        written=written,
    )


def loss_curves(summary: Summary) -> Drawing:
    """Draw validation losses over steps, the reference's as a line across (fig. 5)."""
    names = [arm.arm for arm in summary.arms]
    rows = [
        {"arm": arm.arm, "run": point.run, "step": point.step, "loss": point.loss}
        for arm in summary.arms
        for point in arm.curve
    ]
    stroke = alt.Legend(symbolType="stroke")
    base = alt.Chart(pl.DataFrame(rows)).encode(
        x=alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=8)),
        y=alt.Y("loss:Q", title="validation loss (nats a token)", scale=alt.Scale(zero=False)),
        color=colored("arm", names, legend=stroke),
        tooltip=["arm:N", "run:N", "step:Q", tip("loss", ".4f")],
    )
    # Past the palette's length colors come again, and dashes distinguish them.
    dashes = [DASHES[n // len(PALETTE) % 4] for n in range(len(names))]
    dash = dashed("arm", names, dashes, legend=stroke)
    lines = base.mark_line(strokeWidth=2).encode(detail="run:N", strokeDash=dash)
    points = base.mark_point(filled=True, size=36, opacity=1)
    reference = summary.reference
    across = alt.Chart(pl.DataFrame({"loss": [reference.loss], "name": [reference.name]}))
    rule = across.mark_rule(strokeWidth=1.5, strokeDash=[5, 4]).encode(y="loss:Q")
    label = across.mark_text(align="right", baseline="bottom", dy=-3)
    label = label.encode(y="loss:Q", x=alt.value("width"), text="name:N")
    return alt.layer(rule, label, lines, points).properties(height=360, width="container")


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
    colors = alt.Scale(domain=["kept", "left out"], range=[PALETTE[0], PALETTE[7]])
    axis = alt.Axis(labelAngle=0, values=list(layers[::5]))
    chart = alt.Chart(frame).mark_bar()
    chart = chart.encode(
        x=alt.X("layer:O", title="layer", axis=axis),
        y=alt.Y("value:Q", title=title),
        color=alt.Color("layers:N", scale=colors),
        tooltip=["layer:O", tip("value", ".4~g"), "layers:N"],
    )
    return chart.properties(height=150, width="container")


def _size(sizes: Sizes, key: str, title: str, style: str, unit: float) -> tuple[str, list[str]]:
    ours, theirs = getattr(sizes.heir, key), getattr(sizes.reference, key)
    ratio = f"{ours / theirs:.3f}" if theirs else "–"
    return title, [style.format(theirs * unit), style.format(ours * unit), ratio]
