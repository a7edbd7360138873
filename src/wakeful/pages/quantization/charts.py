"""Charts of a quantization."""

from collections.abc import Sequence

import altair as alt
import polars as pl

from wakeful.pages.charts import PALETTE, Drawing
from wakeful.pages.quantization.findings import Damage, block_values, layer_errors

_POSITIONS = ("rest", "first")
_DASHES = ([1, 0], [4, 3])


def charts(damage: Damage) -> list[tuple[str, Drawing]]:
    """Return every chart with a name fit for a file."""
    return [
        ("layer-error", layer_error(damage)),
        ("input-kurtosis", input_kurtosis(damage)),
        ("block-error", block_error(damage)),
        ("block-kurtosis", block_kurtosis(damage)),
        ("error-against-kurtosis", scatter(damage)),
        *((f"layers-{n}", layer_map(damage, name)) for n, name in enumerate(damage.schemes)),
    ]


def layer_error(damage: Damage) -> Drawing:
    """Draw the relative error of the layers of each block: their root mean square."""
    frames = [
        _over_blocks(layer_errors(damage, name, position), "value").select(
            pl.lit(name).alias("scheme"), pl.lit(position).alias("position"), "layer", "value"
        )
        for name in damage.schemes
        for position in _POSITIONS
    ]
    return _lines(damage, pl.concat(frames), "relative error of layers")


def block_error(damage: Damage) -> Drawing:
    """Draw the relative error of each block's output, with all errors before it."""
    frames = [
        block_values(damage, "block_error", name, position).select(
            pl.lit(name).alias("scheme"), pl.lit(position).alias("position"), "layer", "value"
        )
        for name in damage.schemes
        for position in _POSITIONS
    ]
    return _lines(damage, pl.concat(frames), "relative error of the block's output")


def input_kurtosis(damage: Damage) -> Drawing:
    """Draw the kurtosis of the inputs of each block's layers, first token and the rest."""
    errors = layer_errors(damage, next(iter(damage.schemes)))
    frames = [
        _over_blocks(errors, f"kurtosis_{position}", squared=False).select(
            pl.lit(position).alias("position"), "layer", "value"
        )
        for position in _POSITIONS
    ]
    return _kurtosis(pl.concat(frames), "kurtosis of layers' inputs")


def block_kurtosis(damage: Damage) -> Drawing:
    """Draw the kurtosis of each block's output, first token and the rest."""
    frames = [
        block_values(damage, "kurtosis", "", position).select(
            pl.lit(position).alias("position"), "layer", "value"
        )
        for position in _POSITIONS
    ]
    return _kurtosis(pl.concat(frames), "kurtosis of the block's output")


def scatter(damage: Damage) -> Drawing:
    """Draw every layer's relative error against the kurtosis of its input."""
    frames = [
        layer_errors(damage, name).select(
            pl.lit(name).alias("scheme"), "module", "value", kurtosis="kurtosis_rest"
        )
        for name in damage.schemes
    ]
    frame = pl.concat(frames).filter((pl.col("value") > 0) & (pl.col("kurtosis") > 0))
    chart = (
        alt.Chart(_rounded(frame))
        .mark_point(filled=True, size=26, opacity=0.65)
        .encode(
            x=alt.X(
                "kurtosis:Q", title="kurtosis of the layer's input (all but the first token)",
                scale=alt.Scale(type="log", nice=False, padding=8), axis=_log_axis(),
            ),
            y=alt.Y("value:Q", title="relative error", scale=alt.Scale(type="log", padding=8),
                    axis=_log_axis("~p")),
            color=_schemes(damage),
            tooltip=["scheme:N", "module:N", alt.Tooltip("kurtosis:Q", format=".4~g"),
                     alt.Tooltip("value:Q", format=".3~%", title="relative error")],
        )
    )  # fmt: skip
    return _wide(chart, 300)


def layer_map(damage: Damage, scheme: str) -> Drawing:
    """Draw a scheme's relative error of every layer: blocks by kinds of layer."""
    errors = layer_errors(damage, scheme).drop_nulls("layer")
    kinds = errors["kind"].unique(maintain_order=True).to_list()
    chart = (
        alt.Chart(_rounded(errors.select("layer", "kind", "value", "module")))
        .mark_rect()
        .encode(
            x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("kind:N", title=None, sort=kinds),
            color=alt.Color(
                "value:Q",
                scale=alt.Scale(scheme="cividis", type="log"),
                legend=alt.Legend(title="relative error", format="~p", tickCount=4),
            ),
            tooltip=["module:N", alt.Tooltip("value:Q", format=".3~%", title="relative error")],
        )
    )
    return _wide(chart, 22 * len(kinds))


def _over_blocks(errors: pl.DataFrame, column: str, *, squared: bool = True) -> pl.DataFrame:
    """Return one row a block: the (root) mean (square) of its layers' values."""
    value = pl.col(column)
    mean = value.pow(2).mean().sqrt() if squared else value.mean()
    known = errors.drop_nulls("layer").filter(value.is_finite())
    return known.group_by("layer").agg(mean.alias("value")).sort("layer")


def _lines(damage: Damage, frame: pl.DataFrame, title: str) -> Drawing:
    frame = frame.filter(pl.col("value") > 0)
    chart = (
        alt.Chart(_rounded(frame))
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("layer:Q", title="layer", axis=alt.Axis(format="d", tickMinStep=1)),
            y=alt.Y("value:Q", title=title, scale=alt.Scale(type="log"), axis=_log_axis("~p")),
            color=_schemes(damage, legend=False),
            strokeDash=_position(),
            tooltip=["scheme:N", "position:N", "layer:Q",
                     alt.Tooltip("value:Q", format=".3~%", title="relative error")],
        )
    )  # fmt: skip
    return _wide(chart, 240)


def _kurtosis(frame: pl.DataFrame, title: str) -> Drawing:
    base = alt.Chart(_rounded(frame.filter(pl.col("value") > 0)))
    lines = base.mark_line(strokeWidth=2, color="#7F7F7F").encode(
        x=alt.X("layer:Q", title="layer", axis=alt.Axis(format="d", tickMinStep=1)),
        y=alt.Y("value:Q", title=title, scale=alt.Scale(type="log"), axis=_log_axis()),
        strokeDash=_position(legend=True),
        tooltip=["position:N", "layer:Q", alt.Tooltip("value:Q", format=".4~g", title="kurtosis")],
    )
    gaussian = alt.Chart(pl.DataFrame({"gaussian": [3.0]})).mark_rule(opacity=0.6)
    rule = gaussian.encode(y="gaussian:Q", tooltip=alt.value("a Gaussian has 3"))
    return _wide(alt.layer(rule, lines), 240)


def _position(*, legend: bool = False) -> alt.StrokeDash:
    shown = alt.Legend() if legend else None
    scale = alt.Scale(domain=list(_POSITIONS), range=[list(dash) for dash in _DASHES])
    return alt.StrokeDash("position:N", scale=scale, legend=shown)


def _schemes(damage: Damage, *, legend: bool = True) -> alt.Color:
    scale = alt.Scale(domain=list(damage.schemes), range=list(colors(damage)))
    return alt.Color("scheme:N", scale=scale, legend=alt.Legend() if legend else None)


def colors(damage: Damage) -> Sequence[str]:
    """Return each scheme's color."""
    return [PALETTE[n % len(PALETTE)] for n in range(len(damage.schemes))]


def _log_axis(style: str = "~g") -> alt.Axis:
    return alt.Axis(format=style, tickCount=5)


def _rounded(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the frame with six significant digits, all that a chart shows."""
    return frame.with_columns(pl.selectors.float().round_sig_figs(6))


def _wide(chart: Drawing, height: int) -> Drawing:
    autosize = alt.AutoSizeParams(type="fit-x", contains="padding")
    return chart.properties(width="container", height=height, autosize=autosize)
