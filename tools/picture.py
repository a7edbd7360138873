"""Draw the README's picture: a model's sinks and outliers beside its cure's, light and dark.

    wakeful cure smollm2 --rotate hadamard --rotate_inner --prefix bos --out cured
    python tools/picture.py cured/diagnosis.parquet docs/diagnosis

writes docs/diagnosis-light.svg and docs/diagnosis-dark.svg.
"""

import sys
from pathlib import Path

import altair as alt
import polars as pl
import vl_convert

from wakeful.pages.charts import specification, theme

SHARE, LARGEST = "first_key_share_without_row_0", "max_activation"
COLORS = ["#0072B2", "#D55E00"]


def heads(rows: pl.DataFrame, model: str, title: str) -> alt.Chart:
    """Draw the first-token share of every layer and head."""
    cells = rows.filter(model=model, metric=SHARE).drop_nulls("head").filter(pl.col("layer") >= 0)
    legend = alt.Legend(title="first-token share", gradientLength=120, tickCount=3)
    scale = alt.Scale(scheme="cividis", domain=[0, 1])
    return (
        alt.Chart(cells.select("layer", "head", "value"))
        .mark_rect()
        .encode(
            x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, values=[0, 10, 20, 29])),
            y=alt.Y("head:O", title="head", axis=alt.Axis(values=[0, 4, 8])),
            color=alt.Color("value:Q", scale=scale, legend=legend),
        )
        .properties(width=240, height=130, title=title)
    )


def outliers(rows: pl.DataFrame, names: dict[str, str]) -> alt.Chart:
    """Draw the largest activation of the first token over layers."""
    cells = rows.filter(metric=LARGEST, position="first", variant="paper")
    cells = cells.filter(pl.col("head").is_null() & (pl.col("layer") >= 0))
    cells = cells.with_columns(pl.col("model").replace(names)).select("model", "layer", "value")
    scale = alt.Scale(domain=list(names.values()), range=COLORS)
    color = alt.Color("model:N", scale=scale, legend=alt.Legend(title=None, columns=1))
    return (
        alt.Chart(cells)
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("layer:Q", title="layer", axis=alt.Axis(values=[0, 10, 20, 29])),
            y=alt.Y("value:Q", title=None, scale=alt.Scale(type="log"),
                    axis=alt.Axis(values=[1, 10, 100, 1000, 10000], format="~s")),
            color=color,
            strokeDash=alt.StrokeDash("model:N", legend=None),
        )
        .properties(width=200, height=130, title="largest |x| at the first token")
    )  # fmt: skip


def main() -> None:
    """Write both pictures."""
    source, out = Path(sys.argv[1]), sys.argv[2]
    rows = pl.read_parquet(source)
    names = {"smollm2": "SmolLM2-135M", "smollm2 cured": "the same, cured"}
    chart = alt.hconcat(
        heads(rows, "smollm2", "SmolLM2-135M"),
        heads(rows, "smollm2 cured", "the same function, cured"),
        outliers(rows, names),
        spacing=28,
    ).resolve_scale(color="independent")
    for dark in (False, True):
        spec = specification(chart) | {"config": theme(dark=dark) | {"background": "transparent"}}
        name = f"{out}-{'dark' if dark else 'light'}.svg"
        Path(name).write_text(vl_convert.vegalite_to_svg(spec), "utf-8")


if __name__ == "__main__":
    main()
