"""What quantization did to a model as one offline HTML page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wakeful.pages.page import render
from wakeful.pages.quantization.charts import (
    block_error,
    block_kurtosis,
    colors,
    input_kurtosis,
    layer_error,
    layer_map,
    scatter,
)
from wakeful.pages.quantization.findings import (
    Damage,
    findings,
    layer_errors,
    scheme_figures,
    summary,
    with_digits,
)
from wakeful.runs.run import replaced

_WORST = 8


def write_quantization(
    damage: Damage,
    path: str | Path,
    *,
    title: str,
    method: Mapping[str, Any],
    saved: Mapping[str, Any] | None,
) -> Path:
    """Write the page; an old page stays until the new one is whole."""
    full = summary(damage)
    html = render(
        "quantization.html.j2",
        title=title,
        method=method,
        saved=saved,
        full=full,
        findings=findings(damage),
        rows=[_row(damage, name) for name in damage.schemes],
        before=with_digits(full["perplexity"], full["perplexity_standard_error"], least=4),
        colors=colors(damage),
        layer_error=layer_error(damage),
        input_kurtosis=input_kurtosis(damage),
        block_error=block_error(damage),
        block_kurtosis=block_kurtosis(damage),
        scatter=scatter(damage),
        maps=[(name, layer_map(damage, name), _worst(damage, name)) for name in damage.schemes],
    )
    path = Path(path)
    with replaced(path) as temporary:
        temporary.write_text(html, "utf-8")
    return path


def _row(damage: Damage, name: str) -> dict[str, Any]:
    figures = scheme_figures(damage, name)
    return figures | {
        key: with_digits(figures[key], figures[f"{key}_standard_error"], least=least)
        for key, least in (("perplexity", 4), ("increase", 2), ("loss_increase", 2), ("kl", 2))
    }


def _worst(damage: Damage, name: str) -> list[dict[str, Any]]:
    errors = layer_errors(damage, name)
    parts = {position: layer_errors(damage, name, position) for position in ("first", "rest")}
    for position, frame in parts.items():
        errors = errors.join(
            frame.select("module", frame["value"].alias(position)), on="module", how="left"
        )
    return errors.sort("value", descending=True, nulls_last=True).head(_WORST).to_dicts()
