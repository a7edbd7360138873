"""Sensitivity of layers: the loss increase and the KL when one layer alone is quantized.

Layer i costs ℓ(q({i})) − ℓ(q(∅)), with q(S) the model whose layers S are quantized, paired over
sequences. KL from the full-precision model is the expected increase of the loss on text that this
model writes itself; it ranks layers with less text. `wakeful.quantization.scores` estimates it from
one backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import polars as pl
import torch
from jaxtyping import Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.estimates import Estimate, format_interval, mean_and_error
from wakeful.probes.experts import put
from wakeful.quantization.convert import prepare_model, quantized_layers
from wakeful.quantization.damage import Damage, estimate_fields
from wakeful.quantization.layerwise import layers_from_block_on
from wakeful.quantization.measure import logits_and_targets, loss_and_kl_per_sequence
from wakeful.terminal.display import OnProgress, ignore_progress


@dataclass(frozen=True)
class LayerCost:
    """Cost of quantizing one layer alone, in nats per token, and the layer's bytes."""

    name: str
    alone: Estimate
    """Loss increase when only this layer is quantized."""
    kl: Estimate
    """KL from the full-precision model then."""
    size: int
    """Bytes of the quantized layer."""


@torch.inference_mode()
def measure_layer_costs(
    model: nn.Module,
    quantized_model: nn.Module,
    sequences: Sequence[Int[Tensor, "1 L"]],
    *,
    on_progress: OnProgress = ignore_progress,
) -> list[LayerCost]:
    """Return the loss increase and the KL of quantizing each layer alone, the costliest first.

    `quantized_model` is `model` with quantized layers. These are all exchanged for full-precision
    ones and put back one at a time; at the end all are in place again. A pass starts at the layer's
    block, from stored outputs of earlier blocks, which are the same for all layers of the block.

    Raises:
        WakefulError: no layer is quantized.
    """
    layers = quantized_layers(quantized_model)
    prepared = prepare_model(model)
    if not layers:
        raise WakefulError("no layer is quantized, so there is no cost to measure")
    full_layers = {name: prepared.get_submodule(name) for name in layers}
    costs: list[LayerCost] = []
    try:
        put(quantized_model, full_layers)  # which makes it the full-precision model
        full_logits = [logits_and_targets(quantized_model, tokens)[0] for tokens in sequences]
        full_losses, _ = loss_and_kl_per_sequence(quantized_model, sequences)
        names = chain.from_iterable(layers_from_block_on(quantized_model, layers, sequences))
        for name in names:
            put(quantized_model, {name: layers[name]})
            losses, kl = loss_and_kl_per_sequence(quantized_model, sequences, full_logits)
            put(quantized_model, {name: full_layers[name]})
            increase = mean_and_error((losses - full_losses).tolist())
            size = sum(tensor.nbytes for tensor in layers[name].state_dict().values())
            costs.append(LayerCost(name, increase, mean_and_error(kl.tolist()), size))
            on_progress(len(costs), len(layers))
    finally:
        put(quantized_model, layers)
    return sorted(costs, key=lambda cost: -cost.alone[0])


def cost_frame(costs: Sequence[LayerCost]) -> pl.DataFrame:
    """Return a table of layers' costs, in the order given: nats per token and bytes."""
    rows: list[dict[str, Any]] = []
    for cost in costs:
        estimates = estimate_fields("alone", cost.alone) | estimate_fields("kl", cost.kl)
        rows.append({"module": cost.name, **estimates, "bytes": cost.size})
    return pl.DataFrame(rows)


def describe_costs(costs: Sequence[LayerCost], damage: Damage) -> str:
    """Return a sentence on the costliest layer and on the sum over layers. `costs` begins with the
    costliest layer.
    """
    costliest = costs[0]
    highest_cost = format_interval(*costliest.alone, len(damage.measurement.counts), "+")
    total = sum(cost.alone[0] for cost in costs)
    sentence = (
        f"{costliest.name} costs most alone, {highest_cost} nats per token; the costs of all "
        f"{len(costs)} layers, each alone, add up to {total:+.3f}"
    )
    return sentence.replace("-", "−")  # the signs of costs
