"""Sensitivity of layers: the cost of each alone, and what it gives back of all together.

With ℓ the loss, q(S) the model whose layers S are quantized and A all of them, layer i costs
ℓ(q({i})) − ℓ(q(∅)) alone and ℓ(q(A)) − ℓ(q(A ∖ {i})) together. Both are paired over sequences.
KL from the full-precision model is the loss that its own words would rise by: it tells layers apart
on less text. `wakeful.quantization.scores` estimates it from one backward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.estimates import Estimate, mean_and_error
from wakeful.model.hooks import hooked
from wakeful.probes import exact
from wakeful.probes.experts import put
from wakeful.probes.running import logits_of
from wakeful.quantization.convert import prepared_as, quantized_layers
from wakeful.quantization.layerwise import onward
from wakeful.quantization.measure import losses_and_divergences, predicted


@dataclass(frozen=True)
class LayerCost:
    """Cost of one layer in nats per token, and its bytes."""

    name: str
    alone: Estimate
    together: Estimate
    kl: Estimate
    """KL of the model in which it alone is quantized."""
    kurtosis: float
    """Of its inputs in full precision, all but the first token of a sequence."""
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
    """Return what each quantized layer of `small`, made of `model`, costs, the dearest alone first.

    Each is read once alone and once among all others, from its block on: what comes before is the
    same for all of a block's layers.
    """
    layers = quantized_layers(small)
    plain = prepared_as(model, layers)
    if not layers:
        raise WakefulError("no layer is quantized, so none costs anything")
    full = {name: plain.get_submodule(name) for name in layers}
    bends = _kurtosis(plain, full, sequences)
    try:
        put(small, full)
        own = [predicted(small, tokens)[0] for tokens in sequences]
        full_losses = losses_and_divergences(small, sequences)[0]
        alone = _read_exchanged(small, layers, sequences, own, progress)
        put(small, layers)
        quantized_losses = losses_and_divergences(small, sequences)[0]
        rest = _read_exchanged(small, full, sequences, (), lambda done: progress(len(alone) + done))
    finally:
        put(small, layers)
    costs: list[LayerCost] = []
    for name, (losses, kl) in alone.items():
        figures = {
            "alone": losses - full_losses,
            "together": quantized_losses - rest[name][0],
            "kl": kl,
        }
        estimates = {which: mean_and_error(values.tolist()) for which, values in figures.items()}
        size = layer_bytes(layers[name])
        costs.append(LayerCost(name=name, kurtosis=bends[name], size=size, **estimates))
    return sorted(costs, key=lambda values: -values.alone[0])


def layer_bytes(layer: nn.Module) -> int:
    """Return the bytes of a layer's numbers, scales and biases."""
    return sum(tensor.nbytes for tensor in [*layer.parameters(), *layer.buffers()])


def _read_exchanged(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    sequences: Sequence[Tensor],
    own: Sequence[Tensor],
    on_progress: Callable[[int], None],
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return `losses_and_divergences` with each of the layers alone exchanged."""
    results: dict[str, tuple[Tensor, Tensor]] = {}
    for name in chain.from_iterable(onward(model, layers, sequences)):
        before = model.get_submodule(name)
        put(model, {name: layers[name]})
        results[name] = losses_and_divergences(model, sequences, own)
        put(model, {name: before})
        on_progress(len(results))
    return results


def _kurtosis(
    model: nn.Module, layers: Mapping[str, nn.Module], sequences: Sequence[Tensor]
) -> dict[str, float]:
    """Return the mean kurtosis of each layer's inputs, without the first token of a sequence."""
    kurtoses: dict[str, list[float]] = {name: [] for name in layers}

    def see(name: str, args: tuple[Any, ...]) -> None:
        rows = args[0].reshape(-1, args[0].shape[-1])[1:].float()
        if len(rows):  # an expert may read one token
            kurtoses[name].append(float(exact.kurtosis(rows).mean()))

    with hooked(layers, before=see):
        for tokens in sequences:
            logits_of(model, tokens)
    return {name: sum(values) / max(1, len(values)) for name, values in kurtoses.items()}
