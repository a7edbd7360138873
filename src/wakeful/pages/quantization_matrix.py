"""Several models under several schemes: one matrix of damage, and whether kurtosis foretells it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table as Grid
from rich.text import Text

from wakeful.estimates import with_error
from wakeful.evaluation.damage import (
    Damage,
    follows,
    over_layers,
    over_models,
    predicts,
    summary,
    worst_layers,
)
from wakeful.evaluation.pretrained import PretrainedTable
from wakeful.pages.charts import Drawing, colors, shapes, tip, unchecked
from wakeful.pages.page import write_page
from wakeful.pages.quantization import error_over_kurtosis, headline, next_step, with_errors


def matrix_summary(damages: Sequence[Damage]) -> dict[str, Any]:
    """Return each model's figures as alone, the rank correlations, and the sentence on them."""
    return {
        "models": [summary(damage) for damage in damages],
        "correlations": correlations(damages),
        "kurtosis_predicts": predicts(damages),
    }


def beside(damages: Sequence[Damage], table: PretrainedTable) -> list[dict[str, Any]]:
    """Return every model's perplexities beside a published table's, then the rows nobody measured.

    `ratios` are perplexities over the full-precision one's, ours and the paper's, by scheme.
    """
    rows = []
    for damage in damages:
        each, printed = summary(damage), damage.printed
        found = {figures["scheme"]: figures for figures in each["schemes"]}
        rows.append(
            {
                "model": each["model"],
                "label": printed and printed.label,
                "parameters": f"{damage.parameters / 1e6:,.4g}M",
                "perplexity": each["perplexity"],
                "perplexity_standard_error": each["perplexity_standard_error"],
                "printed": printed and printed.full,
                "kurtosis_first": each["kurtosis_first"],
                "kurtosis_rest": each["kurtosis_rest"],
                "schemes": [
                    {
                        key: found[name][key]
                        for key in ("scheme", "perplexity", "perplexity_standard_error", "ratio")
                    }
                    | {
                        "printed": printed and printed.quantized[name],
                        "printed_ratio": printed and printed.ratio(name),
                    }
                    for name in table.schemes
                ],
            }
        )
    measured = [damage.printed for damage in damages]
    for row in table.rows:
        if row not in measured:
            schemes = [
                {"scheme": name, "printed": row.quantized[name], "printed_ratio": row.ratio(name)}
                for name in table.schemes
            ]
            rows.append({"model": None, "label": row.label, "parameters": row.parameters,
                         "printed": row.full, "schemes": schemes})  # fmt: skip
    return rows


def told(damages: Sequence[Damage], table: PretrainedTable) -> list[str]:
    """Say of each model by how much a scheme multiplies its perplexity, and the paper's word."""
    sentences = []
    for row in beside(damages, table):
        for each in row["schemes"] if row["model"] else ():
            ours = "a non-finite multiple"
            if each["ratio"] is not None:
                ours = f"{with_error(each['ratio'])} times"
            theirs = "the paper does not have it"
            if row["label"]:
                theirs = f"{with_error(each['printed_ratio'])} times in the paper"
            sentences.append(
                f"{row['model']}: {each['scheme']} makes the perplexity {ours} what it was, "
                f"{theirs}."
            )
    return sentences


def correlations(damages: Sequence[Damage]) -> list[dict[str, Any]]:
    """Return Spearman's ρ of each scheme: over all layers, with kurtosis and with max over mean,
    and over models; None where there are fewer than three.
    """
    rows = []
    for name in damages[0].schemes:
        layers = over_layers(damages, name)
        rows.append(
            {
                "scheme": name,
                "layers": len(layers),
                "layers_kurtosis": follows(layers, "kurtosis_rest"),
                "layers_max_over_mean": follows(layers, "max_over_mean_rest"),
                "models": len(damages),
                "models_kurtosis": follows(over_models(damages, name), "kurtosis_rest"),
            }
        )
    return rows


def matrix_grid(damages: Sequence[Damage]) -> Grid:
    """Return one row a model: what each scheme adds to its loss, in nats a token."""
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    grid.add_column("loss increase", no_wrap=True)
    for name in damages[0].schemes:
        grid.add_column(Text(name), justify="right")
    for damage in damages:
        cells = [with_errors(each)["loss_increase"] for each in summary(damage)["schemes"]]
        grid.add_row(Text(damage.measurement.name), *cells)
    return grid


def matrix_charts(damages: Sequence[Damage]) -> list[tuple[str, Drawing]]:
    """Return each scheme's layers of all models, error against kurtosis, by the scheme's name.

    The page has one legend for all of them.
    """
    return [
        (name, _scatter(damages, name))
        for name, scheme in damages[0].schemes.items()
        if scheme.weights is not None
    ]


def _scatter(damages: Sequence[Damage], scheme: str) -> Drawing:
    frame = over_layers(damages, scheme).select(
        "model", "module", "value", kurtosis="kurtosis_rest", peak="max_over_mean_rest"
    )
    names = [damage.measurement.name for damage in damages]
    peak = tip("peak", ".4~g", title="max / mean")
    return error_over_kurtosis(frame, "model", names, peak, height=260)


@unchecked
def write_matrix(
    damages: Sequence[Damage],
    path: str | Path,
    *,
    title: str,
    method: Mapping[str, Any],
    table: PretrainedTable | None = None,
    sources: Sequence[str] = (),
) -> Path:
    """Write the page, a published `table` first; an old page stays until the new one is whole.

    `sources` are what the models were asked for as, for a command to type.
    """
    named = sources if len(sources) == len(damages) else [each.measurement.name for each in damages]
    steps = [
        replace(step, words=f"{damage.measurement.name}: {step.words}")
        for damage, source in zip(damages, named, strict=True)
        for step in [next_step(damage, source)]
    ]
    full = [summary(damage) for damage in damages]
    rows = [
        {
            "name": each["model"],
            "before": with_error(each["perplexity"], each["perplexity_standard_error"]),
            "full": each,
            "cells": [figures | with_errors(figures) for figures in each["schemes"]],
            "worst": [(name, worst_layers(damage, name)) for name in damage.schemes],
        }
        for damage, each in zip(damages, full, strict=True)
    ]
    return write_page(
        path,
        "quantization_matrix",
        title=title,
        headlines=[headline(damage) for damage in damages],
        steps=steps,
        method=method,
        paper=table,
        printed=[] if table is None else _cells(damages, table),
        told=[] if table is None else told(damages, table),
        schemes=list(damages[0].schemes),
        rows=rows,
        colors=colors(damages),
        shapes=shapes(damages),
        sentence=predicts(damages),
        correlations=correlations(damages),
        charts=matrix_charts(damages),
    )


def _cells(damages: Sequence[Damage], table: PretrainedTable) -> list[dict[str, Any]]:
    """Return the rows of `beside` with perplexities as they are shown."""
    rows = beside(damages, table)
    for row in rows:
        for each in (row, *row["schemes"]):
            each["shown"] = "–"
            if "perplexity" in each:
                error = each["perplexity_standard_error"]
                each["shown"] = with_error(each["perplexity"], error)
    return rows
