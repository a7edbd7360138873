"""Scores of one or more models as rows to show, charts, and one offline HTML page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl

from wakeful.evaluation.scores import Score, difference
from wakeful.pages.charts import PALETTE, Drawing
from wakeful.pages.page import render
from wakeful.runs.run import replaced

_MANY = 1e7
"""Larger figures are written with a power of ten."""


@dataclass(frozen=True)
class Cell:
    """A model's figure with its error and, past the first model, its paired difference."""

    value: str
    difference: str = ""


@dataclass(frozen=True)
class Row:
    """One metric of one task, a cell for each model."""

    title: str
    better: str
    cells: list[Cell]


def shown(scores: Sequence[Score]) -> tuple[list[str], list[Row]]:
    """Return the models and, for each task and metric, what to show of each model."""
    names = list(dict.fromkeys(score.model for score in scores))
    rows: list[Row] = []
    for task, metric in _measures(scores):
        found = {s.model: s for s in scores if (s.task, s.metric) == (task, metric)}
        first = found.get(names[0])
        cells: list[Cell] = []
        for name in names:
            score = found.get(name)
            if score is None:
                cells.append(Cell("–"))
                continue
            paired = difference(score, first) if first and score is not first else None
            cells.append(
                Cell(written(score.figure, score.error), written(*paired, "+") if paired else "")
            )
        better = "higher is better" if any(s.higher_is_better for s in found.values()) else ""
        rows.append(Row(f"{task}: {metric}", better or "lower is better", cells))
    return names, rows


def written(figure: float, error: float, sign: str = "") -> str:
    """Return "figure ± error" to two digits of the error; four places where there is none."""
    if _MANY < max(abs(figure), error) < math.inf:
        return f"{figure:{sign}.3g} ± {error:.2g}".replace("-", "−")
    if not error > 0 or not math.isfinite(error):
        return f"{figure:{sign},.4f}".replace("-", "−")
    places = min(8, max(0, 1 - math.floor(math.log10(error))))
    return f"{figure:{sign},.{places}f} ± {error:,.{places}f}".replace("-", "−")


def score_charts(scores: Sequence[Score]) -> list[tuple[str, Drawing]]:
    """Return a chart for each task and metric: every model's figure ± one standard error."""
    names = list(dict.fromkeys(score.model for score in scores))
    colors = alt.Scale(domain=names, range=[PALETTE[n % len(PALETTE)] for n in range(len(names))])
    charts: list[tuple[str, Drawing]] = []
    for row, (task, metric) in zip(shown(scores)[1], _measures(scores), strict=True):
        drawn = [
            {
                "model": s.model,
                "figure": s.figure,
                "low": s.figure - s.error if math.isfinite(s.error) else s.figure,
                "high": s.figure + s.error if math.isfinite(s.error) else s.figure,
            }
            for s in scores
            if (s.task, s.metric) == (task, metric) and math.isfinite(s.figure)
        ]
        if drawn:
            charts.append((f"{row.title}, {row.better}", _dots(pl.DataFrame(drawn), names, colors)))
    return charts


def write_evaluation(
    scores: Sequence[Score], path: str | Path, *, title: str, method: Mapping[str, Any]
) -> Path:
    """Write the page; an old page stays until the new one is whole."""
    names, rows = shown(scores)
    html = render(
        "evaluation.html.j2",
        title=title,
        names=names,
        rows=rows,
        colors=[PALETTE[n % len(PALETTE)] for n in range(len(names))],
        charts=score_charts(scores),
        paired=any(cell.difference for row in rows for cell in row.cells),
        method=method,
    )
    path = Path(path)
    with replaced(path) as temporary:
        temporary.write_text(html, "utf-8")
    return path


def _measures(scores: Sequence[Score]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((score.task, score.metric) for score in scores))


def _dots(frame: pl.DataFrame, names: Sequence[str], colors: alt.Scale) -> Drawing:
    x = alt.X("figure:Q", title=None, scale=alt.Scale(zero=False, nice=True, padding=12),
              axis=alt.Axis(tickCount=5, format=".4~g", labelOverlap=True))  # fmt: skip
    base = alt.Chart(frame).encode(
        y=alt.Y("model:N", title=None, sort=list(names)),
        color=alt.Color("model:N", scale=colors, legend=None),
    )
    points = base.mark_point(filled=True, size=80, opacity=1).encode(
        x=x, tooltip=["model:N", alt.Tooltip("figure:Q", format=",.6~g")]
    )
    rules = base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q"), x2="high:Q")
    return alt.layer(rules, points).properties(height=34 * len(frame), width="container")
