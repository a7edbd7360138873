"""Costs of layers: a frame, and sentences on the dearest and on kurtosis as a predictor."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from wakeful.estimates import finite, with_interval
from wakeful.quantization.damage import follows, named
from wakeful.quantization.sensitivity import LayerCost

_FIGURES = ("alone", "together", "kl")


def cost_frame(costs: Sequence[LayerCost]) -> pl.DataFrame:
    """Return one row per layer, the dearest first: figures in nats per token, bytes, kurtosis."""
    rows: list[dict[str, Any]] = []
    for cost in costs:
        row: dict[str, Any] = {"module": cost.name}
        for name in _FIGURES:
            row |= named(name, getattr(cost, name))
        rows.append(row | {"kurtosis": finite(cost.kurtosis), "bytes": cost.size})
    return pl.DataFrame(rows)


def cost_sentences(costs: Sequence[LayerCost], count: int) -> list[str]:
    """Return which layer costs most, what the sum of all is, and what kurtosis says of it.

    Costs are means over `count` sequences.
    """
    first = costs[0]
    total = sum(cost.alone[0] for cost in costs)
    frame = cost_frame(costs)
    sentences = [
        f"{first.name} costs most alone, {with_interval(*first.alone, count, '+')} nats per token; "
        f"the sum of all {len(costs)} layers' costs alone is {total:+.3f}"
    ]
    for name, effect in (("alone", "loss that a layer costs alone"), ("kl", "KL that it causes")):
        rho = follows(frame.with_columns(value=name), "kurtosis")
        if rho is not None:
            sentences.append(
                f"The kurtosis of a layer's inputs and the {effect}: Spearman's ρ = {rho:+.2f} "
                f"over {len(costs)} layers"
            )
    return [cost.replace("-", "−") for cost in sentences]
