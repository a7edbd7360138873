"""Sensitivity of layers: the loss and the KL that each costs when it alone is quantized.

Layer i costs ℓ(q({i})) − ℓ(q(∅)), q(S) the model whose layers S are quantized, paired over
sequences. KL from the full-precision model is the loss that its own words would rise by: it tells
layers apart on less text. `wakeful.quantization.scores` estimates it from one backward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import polars as pl
import torch
from jaxtyping import Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.estimates import Estimate, finite_or_none, format_interval, mean_and_error
from wakeful.probes.experts import put
from wakeful.quantization.convert import prepared_as, quantized_layers
from wakeful.quantization.damage import Damage, follows, layer_errors, named
from wakeful.quantization.layerwise import onward
from wakeful.quantization.measure import losses_and_divergences, predicted


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer in nats per token, and its bytes."""

    name: str
    alone: Estimate
    kl: Estimate
    size: int
    """Bytes as quantized."""


@torch.inference_mode()
def measure_layer_costs(
    model: nn.Module,
    small: nn.Module,
    sequences: Sequence[Int[Tensor, "1 L"]],
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> list[LayerCost]:
    """Return what each quantized layer of `small`, made of `model`, costs, the dearest first.

    Each is read from its block on: what comes before is the same for all of a block's layers.
    """
    layers = quantized_layers(small)
    plain = prepared_as(model, layers)
    if not layers:
        raise WakefulError("no layer is quantized, so none costs anything")
    full = {name: plain.get_submodule(name) for name in layers}
    found: list[LayerCost] = []
    try:
        put(small, full)
        own = [predicted(small, tokens)[0] for tokens in sequences]
        before = losses_and_divergences(small, sequences)[0]
        for name in chain.from_iterable(onward(small, layers, sequences)):
            put(small, {name: layers[name]})
            losses, kl = losses_and_divergences(small, sequences, own)
            put(small, {name: full[name]})
            alone, divergence = (mean_and_error(x.tolist()) for x in (losses - before, kl))
            size = sum(tensor.nbytes for tensor in layers[name].state_dict().values())
            found.append(LayerCost(name, alone, divergence, size))
            progress(len(found))
    finally:
        put(small, layers)
    return sorted(found, key=lambda cost: -cost.alone[0])


def cost_frame(costs: Sequence[LayerCost], damage: Damage) -> pl.DataFrame:
    """Return one row per layer, the dearest first: figures in nats per token, bytes, and the
    kurtosis of its inputs, all but the first token of a sequence.
    """
    errors = layer_errors(damage, next(iter(damage.schemes)))
    kurtosis = dict(errors.select("module", "kurtosis_rest").iter_rows())
    rows: list[dict[str, Any]] = [
        {"module": cost.name, **named("alone", cost.alone), **named("kl", cost.kl),
         "kurtosis": finite_or_none(kurtosis.get(cost.name)), "bytes": cost.size}
        for cost in costs
    ]  # fmt: skip
    return pl.DataFrame(rows, schema_overrides={"kurtosis": pl.Float64})


def cost_sentences(costs: Sequence[LayerCost], damage: Damage) -> list[str]:
    """Return which layer costs most, what the sum of all is, and what kurtosis says of it."""
    first, count = costs[0], len(damage.measurement.counts)
    total = sum(cost.alone[0] for cost in costs)
    frame = cost_frame(costs, damage)
    sentences = [
        f"{first.name} costs most alone, {format_interval(*first.alone, count, '+')} nats per "
        f"token; the sum of all {len(costs)} layers' costs alone is {total:+.3f}"
    ]
    for name, effect in (("alone", "loss that a layer costs alone"), ("kl", "KL that it causes")):
        rho = follows(frame.with_columns(value=name), "kurtosis")
        if rho is not None:
            sentences.append(
                f"The kurtosis of a layer's inputs and the {effect}: Spearman's ρ = {rho:+.2f} "
                f"over {len(costs)} layers"
            )
    return [sentence.replace("-", "−") for sentence in sentences]
