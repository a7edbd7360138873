"""Diagnoses of one or more models as one offline HTML page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from wakeful.evaluation.diagnosis import Diagnosis
from wakeful.pages.charts import PALETTE
from wakeful.pages.diagnosis.charts import (
    heatmap,
    hidden_picture,
    layer_charts,
    mean_attention,
    pictures,
    rank_strips,
    spectra,
    top_importance,
)
from wakeful.pages.diagnosis.findings import findings, summary
from wakeful.pages.page import render
from wakeful.probes.base import block_outputs
from wakeful.runs.run import replaced

_COMPARED = (
    ("loss", "loss (nats)", "{:.4f}"),
    ("first_key_share_without_row_0", "first-token share, without row 0", "{:.3f}"),
    ("first_key_share_with_row_0", "first-token share, with row 0", "{:.3f}"),
    ("first_key_mass_without_row_0", "first-token mass, without row 0", "{:.3f}"),
    ("first_key_mass_with_row_0", "first-token mass, with row 0", "{:.3f}"),
    ("entropy", "entropy (nats)", "{:.3f}"),
    ("median_head_rank", "median head rank", "{:.0f}"),
    ("heads_near_rank_1", "heads near rank 1", "{:.0f}"),
    ("value_drain_lowest", "lowest value drain", "{:.3f}"),
    ("kurtosis_first", "kurtosis, first", "{:.1f}"),
    ("kurtosis_rest", "kurtosis, rest", "{:.1f}"),
    ("max_activation_first", "max |x|, first", "{:,.1f}"),
    ("max_activation_rest", "max |x|, rest", "{:,.1f}"),
)


def write_diagnosis(
    diagnoses: Sequence[Diagnosis],
    path: str | Path,
    *,
    title: str,
    method: Mapping[str, Any],
) -> Path:
    """Write the page; an old page stays until the new one is whole."""
    figures = [summary(diagnosis) for diagnosis in diagnoses]
    html = render(
        "diagnosis.html.j2",
        title=title,
        method=method,
        models=[
            {
                "name": diagnosis.name,
                "figures": figure,
                "findings": findings(diagnosis),
                "rank": heatmap(diagnosis, "rank", "rank"),
                "share": heatmap(diagnosis, "first_key_share_without_row_0", "first-token share"),
                "pictures": pictures(diagnosis),
                "mean": mean_attention(diagnosis),
                "hidden": hidden_picture(diagnosis),
                "channels": _channels(diagnosis),
            }
            for diagnosis, figure in zip(diagnoses, figures, strict=True)
        ],
        compared=[
            (label, [_compared(figure[key], figures[0][key], style) for figure in figures])
            for key, label, style in _COMPARED
        ],
        colors=[PALETTE[n % len(PALETTE)] for n in range(len(diagnoses))],
        curves=layer_charts(diagnoses),
        strips=rank_strips(diagnoses),
        spectra=spectra(diagnoses),
        top=top_importance(diagnoses),
    )
    path = Path(path)
    with replaced(path) as temporary:
        temporary.write_text(html, "utf-8")
    return path


def _channels(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Return the channels that stand out in most layers, with where they are largest."""
    rows = block_outputs(diagnosis.rows.filter(pl.col("metric") == "outlier_channel"))
    top = (
        rows.sort("value", descending=True)
        .group_by("variant", maintain_order=True)
        .agg(
            pl.len().alias("layers"),
            pl.col("value").first().alias("largest"),
            pl.col("layer").first(),
            pl.col("position").first(),
        )
        .sort("largest", descending=True)
        .head(8)
    )
    return top.to_dicts()


def _compared(value: float | None, first: float | None, style: str) -> tuple[str, str]:
    """Return a figure and, for all models but the first, its difference to the first model's."""
    if value is None:
        return "–", ""
    if first is None or value is first:
        return style.format(value), ""
    return style.format(value), style.replace("{:", "{:+").format(value - first)
