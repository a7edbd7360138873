"""Costs of layers: a frame, and sentences on the dearest and on kurtosis as a predictor."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from wakeful.estimates import finite, with_interval
from wakeful.quantization.damage import follows, named
from wakeful.quantization.sensitivity import LayerCost

_FIGURES = ("alone", "together", "kl")


def cost_frame(found: Sequence[LayerCost]) -> pl.DataFrame:
    """Return one row per layer, the dearest first: figures in nats per token, bytes, kurtosis."""
    rows: list[dict[str, Any]] = []
    for each in found:
        row: dict[str, Any] = {"module": each.name}
        for name in _FIGURES:
            row |= named(name, getattr(each, name))
        rows.append(row | {"kurtosis": finite(each.kurtosis), "bytes": each.size})
    return pl.DataFrame(rows)


def cost_sentences(found: Sequence[LayerCost], count: int) -> list[str]:
    """Return which layer costs most, what the sum of all is, and what kurtosis says of it.

    Costs are means over `count` sequences.
    """
    first = found[0]
    total = sum(each.alone[0] for each in found)
    frame = cost_frame(found)
    told = [
        f"{first.name} costs most alone, {with_interval(*first.alone, count, '+')} nats per token; "
        f"the sum of all {len(found)} layers' costs alone is {total:+.3f}"
    ]
    for name, words in (("alone", "loss that a layer costs alone"), ("kl", "KL that it causes")):
        rho = follows(frame.with_columns(value=name), "kurtosis")
        if rho is not None:
            told.append(
                f"The kurtosis of a layer's inputs and the {words}: Spearman's ρ = {rho:+.2f} over "
                f"{len(found)} layers"
            )
    return [each.replace("-", "−") for each in told]
