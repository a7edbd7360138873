"""What layers cost, as a table and in sentences: the dearest, and whether kurtosis foretells it."""

from collections.abc import Sequence
from typing import Any

import polars as pl
from rich.table import Table

from wakeful.estimates import finite, with_error
from wakeful.evaluation.damage import follows
from wakeful.quant.sensitivity import LayerCost

SHOWN = 10
"""Layers that a terminal shows."""
_FIGURES = ("alone", "together", "kl")


def cost_frame(found: Sequence[LayerCost]) -> pl.DataFrame:
    """Return a row a layer, the dearest alone first: figures in nats a token, bytes, kurtosis."""
    rows: list[dict[str, Any]] = []
    for each in found:
        row: dict[str, Any] = {"module": each.name}
        for name in _FIGURES:
            value, error = getattr(each, name)
            row |= {name: finite(value), f"{name}_standard_error": finite(error)}
        rows.append(row | {"kurtosis": finite(each.kurtosis), "bytes": each.size})
    return pl.DataFrame(rows)


def cost_sentences(found: Sequence[LayerCost]) -> list[str]:
    """Return which layer costs most, what the sum of all is, and what kurtosis says of it."""
    first = found[0]
    value, error = first.alone
    total = sum(each.alone[0] for each in found)
    frame = cost_frame(found)
    told = [
        f"{first.name} costs most alone, {with_error(value, error, '+')} nats a token; the sum of "
        f"all {len(found)} layers' costs alone is {total:+.3f}"
    ]
    for name, words in (("alone", "loss that a layer costs alone"), ("kl", "KL that it causes")):
        rho = follows(frame.with_columns(value=name), "kurtosis")
        if rho is not None:
            told.append(
                f"The kurtosis of a layer's inputs and the {words}: Spearman's ρ = {rho:+.2f} over "
                f"{len(found)} layers"
            )
    return [each.replace("-", "−") for each in told]


def cost_table(found: Sequence[LayerCost], upgraded: Sequence[str]) -> Table:
    """Return the dearest layers for a terminal, those that take the better scheme marked."""
    table = Table("layer", "alone", "together", "KL", "kurtosis", "bytes", "", box=None)
    for each in found[:SHOWN]:
        pairs = (getattr(each, name) for name in _FIGURES)
        figures = (with_error(value, error, "+") for value, error in pairs)
        better = "better scheme" if each.name in upgraded else ""
        table.add_row(each.name, *figures, f"{each.kurtosis:.3g}", f"{each.size:,}", better)
    return table
