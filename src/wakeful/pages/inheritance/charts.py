"""Charts of an inheritance."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import polars as pl

from wakeful.pages.charts import PALETTE, Drawing

_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
FIGURES = {
    "rank": "largest head rank",
    "mass": "columns holding the mass",
    "influence": "block influence",
    "angle": "angular distance (of π)",
}
"""Figures that layers are chosen by, and their axis titles."""


def loss_curves(summary: Mapping[str, Any]) -> Drawing:
    """Draw validation losses over steps, the reference's as a line across (fig. 5)."""
    names = [arm["arm"] for arm in summary["arms"]]
    rows = [
        {"arm": arm["arm"], "run": point["run"], "step": point["step"], "loss": point["loss"]}
        for arm in summary["arms"]
        for point in arm["curve"]
    ]
    frame = pl.DataFrame(rows)
    base = alt.Chart(frame).encode(
        x=alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=8)),
        y=alt.Y("loss:Q", title="validation loss (nats a token)", scale=alt.Scale(zero=False)),
        color=_color(names),
        tooltip=["arm:N", "run:N", "step:Q", alt.Tooltip("loss:Q", format=".4f")],
    )
    # Past the palette's length colors come again, and dashes tell them apart.
    dashes = [_DASHES[n // len(PALETTE) % len(_DASHES)] for n in range(len(names))]
    dash = alt.StrokeDash(
        "arm:N",
        scale=alt.Scale(domain=names, range=dashes),
        legend=alt.Legend(symbolType="stroke"),
    )
    lines = base.mark_line(strokeWidth=2).encode(detail="run:N", strokeDash=dash)
    points = base.mark_point(filled=True, size=36, opacity=1)
    reference = summary["reference"]
    line = pl.DataFrame({"loss": [reference["loss"]], "name": [reference["name"]]})
    rule = alt.Chart(line).mark_rule(strokeWidth=1.5, strokeDash=[5, 4]).encode(y="loss:Q")
    label = (
        alt.Chart(line)
        .mark_text(align="right", baseline="bottom", dy=-3)
        .encode(y="loss:Q", x=alt.value("width"), text="name:N")
    )
    return alt.layer(rule, label, lines, points).properties(height=360, width="container")


def layer_figures(summary: Mapping[str, Any]) -> list[tuple[str, Drawing]]:
    """Draw the figures of every layer that the choice had before it; kept layers are marked."""
    kept = set(summary["choice"]["layers"])
    return [
        (FIGURES[name], _bars(values, kept, FIGURES[name]))
        for name, values in summary["choice"]["figures"].items()
        if name in FIGURES
    ]


def colors(summary: Mapping[str, Any]) -> list[str]:
    """Return the color of each arm."""
    return [PALETTE[n % len(PALETTE)] for n in range(len(summary["arms"]))]


def _bars(values: Sequence[float], kept: set[int], title: str) -> Drawing:
    frame = pl.DataFrame(
        {
            "layer": list(range(len(values))),
            "value": [float(value) for value in values],
            "layers": ["kept" if layer in kept else "left out" for layer in range(len(values))],
        }
    )
    return (
        alt.Chart(frame)
        .mark_bar()
        .encode(
            x=alt.X(
                "layer:O",
                title="layer",
                axis=alt.Axis(labelAngle=0, values=list(range(0, len(values), 5))),
            ),
            y=alt.Y("value:Q", title=title),
            color=alt.Color(
                "layers:N",
                scale=alt.Scale(domain=["kept", "left out"], range=[PALETTE[0], PALETTE[7]]),
            ),
            tooltip=["layer:O", alt.Tooltip("value:Q", format=".4~g"), "layers:N"],
        )
        .properties(height=150, width="container")
    )


def _color(names: Sequence[str]) -> alt.Color:
    colors = [PALETTE[n % len(PALETTE)] for n in range(len(names))]
    scale = alt.Scale(domain=list(names), range=colors)
    return alt.Color("arm:N", scale=scale, legend=alt.Legend(symbolType="stroke"))
