"""Draw the pictures of README and of docs/cure.md: a model beside its cure, light and dark.

    wakeful cure smollm2 --rotate hadamard --rotate_inner --prefix bos --out cured
    python tools/picture.py cured/diagnosis.parquet docs

writes diagnosis-light.svg, diagnosis-dark.svg, cure-light.svg and cure-dark.svg into the folder.
"""

import sys
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import vl_convert

from wakeful.reports.charts import (
    DASHES,
    SHARE,
    Drawing,
    encode_colors,
    encode_names,
    heatmap,
    round_digits,
    specification,
    theme,
)

NAMES = {"smollm2": "SmolLM2-135M", "smollm2 cured": "the same, cured"}
"""What the models are called in the pictures, by their names in the table."""
LARGEST = "largest |x| at the first token"
FIRST_TOKEN = "first_key_share_without_row_0"
_TICKS = [0, 10, 20, 29]
"""Of the 30 layers."""
_HEIGHT = 130


def head_map(rows: pl.DataFrame, model: str, title: str) -> Drawing:
    """Draw the first-token share of every layer and head."""
    cells = rows.filter(model=model, metric=FIRST_TOKEN).drop_nulls("head")
    cells = round_digits(cells.filter(pl.col("layer") >= 0).select("layer", "head", "value"), 3)
    x = alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, values=_TICKS))
    y = alt.Y("head:O", title="head", axis=alt.Axis(values=[0, 4, 8]))
    legend = alt.Legend(title="first-token share", gradientLength=120, tickCount=3)
    chart = heatmap(cells, x, y, "value", legend, domain=SHARE)
    return chart.properties(width=240, height=_HEIGHT, title=title)


def curve(
    rows: pl.DataFrame, metric: str, position: str, title: str, y: alt.Y, columns: int = 2
) -> Drawing:
    """Draw a metric over layers, a line a model, under a legend of as many columns."""
    cells = rows.filter(metric=metric, position=position, variant="paper")
    cells = cells.filter(pl.col("head").is_null() & (pl.col("layer") >= 0))
    cells = cells.with_columns(pl.col("model").replace(NAMES)).select("model", "layer", "value")
    names = list(NAMES.values())
    legend = alt.Legend(symbolType="stroke", columns=columns)
    chart = alt.Chart(round_digits(cells, 4)).mark_line(strokeWidth=2)
    chart = chart.encode(
        x=alt.X("layer:Q", title="layer", axis=alt.Axis(values=_TICKS)),
        y=y,
        color=encode_colors("model", names, legend=legend),
        strokeDash=encode_names(
            alt.StrokeDash, "model", names, DASHES[: len(names)], legend=legend
        ),
    )
    return chart.properties(width=210, height=_HEIGHT, title=title)


def _powers(top: int) -> alt.Y:
    """Return a logarithmic axis with a tick at every power of ten up to 10 ** top."""
    axis = alt.Axis(values=[10**n for n in range(top + 1)], format="~s")
    return alt.Y("value:Q", title=None, scale=alt.Scale(type="log"), axis=axis)


def of_readme(rows: pl.DataFrame) -> Any:
    """Draw both models' heads, and the first token's largest activation."""
    largest = curve(rows, "max_activation", "first", LARGEST, _powers(4), columns=1)
    maps = [head_map(rows, model, NAMES[model]) for model in NAMES]
    chart = alt.hconcat(*maps, largest, spacing=28)
    return chart.resolve_scale(color="independent", strokeDash="independent")


def of_cure(rows: pl.DataFrame) -> Any:
    """Draw what both models' layers do, under one legend."""
    share = alt.Y("value:Q", title=None, scale=alt.Scale(domain=SHARE), axis=alt.Axis(tickCount=3))
    charts = [
        curve(rows, FIRST_TOKEN, "all", "first-token share", share),
        curve(rows, "kurtosis", "first", "kurtosis at the first token", _powers(2)),
        curve(rows, "max_activation", "first", LARGEST, _powers(4)),
    ]
    return alt.hconcat(*charts, spacing=28)


def main() -> None:
    """Write both pictures, each light and dark."""
    rows, folder = pl.read_parquet(sys.argv[1]), Path(sys.argv[2])
    for name, chart in (("diagnosis", of_readme(rows)), ("cure", of_cure(rows))):
        for shade in ("light", "dark"):
            config = theme(dark=shade == "dark") | {"background": "transparent"}
            svg = vl_convert.vegalite_to_svg(specification(chart) | {"config": config})
            (folder / f"{name}-{shade}.svg").write_text(svg, "utf-8")


if __name__ == "__main__":
    main()
