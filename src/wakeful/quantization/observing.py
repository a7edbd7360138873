"""Statistics of calibration text at linear layers, recorded by hooks."""

import re
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.hooks import hooked
from wakeful.probes.running import logits_of
from wakeful.quantization.gradients import output_gradients
from wakeful.quantization.layerwise import Enough
from wakeful.quantization.linear import matrix
from wakeful.quantization.schemes.methods import InputStatistics, Readers
from wakeful.quantization.weighing import TokenWeights, mean_square

_EXPERT = re.compile(r"(?P<place>.+)\.experts\.(?:\w+\.)?(?P<number>\d+)(?:\..+)?")
"""The name of an expert's layer: the experts' place, then a projection's list or the expert."""


@torch.no_grad()
def observe(
    model: nn.Module,
    layers: dict[str, nn.Module],
    calibration: Sequence[Tensor],
    *,
    products: bool = False,
    weights: TokenWeights | None = None,
    weighs: bool = False,
    outputs: bool = False,
) -> dict[str, InputStatistics]:
    """Return what calibration tokens show of each layer in the full-precision model.

    Layers that read the same tensor share what is seen of it. `products` asks for the inputs' Gram
    matrices, with `weights` of tokens for each layer's own, which are found in the same pass where
    it `weighs` them; `outputs` asks for the largest outputs, which multiplies every layer a second
    time.
    """
    layer_statistics: dict[str, InputStatistics] = {}
    sequence_weights: dict[str, Mapping[int, Tensor]] = {}  # the weights of a sequence, by the call
    held: dict[tuple[str, int], tuple[Tensor, InputStatistics]] = {}  # inputs that wait for theirs
    calls = Counter[str]()
    read: list[
        tuple[weakref.ref[Tensor], InputStatistics]
    ] = []  # of this forward pass, as long as they live

    def see(name: str, args: tuple[Any, ...], _output: object) -> None:
        layer, x = layers[name], args[0]
        shared = next((statistics for tensor, statistics in read if tensor() is x), None)
        statistics = layer_statistics.get(name)
        if statistics is None:
            statistics = _new_statistics(
                layer, shared, products=products, own=weighs or weights is not None
            )
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        turn = calls[name]
        calls[name] += 1
        if weighs:
            held[name, turn] = rows, statistics
        elif weights is not None and turn in sequence_weights[name]:
            weigh(rows, statistics, sequence_weights[name][turn])
        if shared is None or shared.channels is not statistics.channels:
            torch.maximum(statistics.channels, rows.abs().amax(0), out=statistics.channels)
            if statistics.products is not None and not weighs and weights is None:
                statistics.products += rows.T @ rows
        if outputs:
            statistics.outputs = max(statistics.outputs, float(plain_linear(layer, x).abs().max()))
        layer_statistics[name] = statistics
        read[:] = [entry for entry in read if entry[0]() is not None]
        if shared is None:
            read.append((weakref.ref(x), statistics))

    def weigh(rows: Tensor, layer_statistics: InputStatistics, weighed: Tensor) -> None:
        if layer_statistics.products is not None:
            layer_statistics.products += rows.T @ (rows * weighed.unsqueeze(1))

    def weigh_held(name: str, turn: int, gradient: Tensor) -> None:
        weigh(*held.pop((name, turn)), mean_square(gradient))

    with ExitStack() as around:
        reads = partial(logits_of, model)
        if weighs:
            reads = around.enter_context(output_gradients(model, layers, weigh_held))
        around.enter_context(hooked(layers, after=see))
        for number, tokens in enumerate(calibration):
            for notes in (read, held, calls):
                notes.clear()
            sequence_weights.update(
                {
                    name: weights_of_sequences[number]
                    for name, weights_of_sequences in (weights or {}).items()
                }
            )
            with suppress(Enough):
                reads(tokens)
    unread = [name for name in layers if name not in layer_statistics]
    if unread:
        raise WakefulError(
            f"calibration text never reaches {numbered(unread)}: give more "
            "--calibration_sequences, or leave them out with --skip"
        )
    return layer_statistics


def _new_statistics(
    layer: nn.Module, shared: InputStatistics | None, *, products: bool, own: bool
) -> InputStatistics:
    """Return what a layer's first input is noted in: in the notes of another that read it too.

    The tensors are then the same objects, but for products that are its `own`.
    """
    top = matrix(layer)[0].detach().float().abs().amax(0)
    gram = top.new_zeros(len(top), len(top)) if products and (own or shared is None) else None
    if shared is None:
        statistics = InputStatistics(torch.zeros_like(top), 0.0, gram, Readers(top))
    else:
        torch.maximum(shared.readers.weights, top, out=shared.readers.weights)
        gram = shared.products if gram is None else gram
        statistics = replace(shared, outputs=0.0, products=gram)
    return statistics


def plain_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Return x Wᵀ + b, the product alone where the layer does more with it."""
    weight, bias = matrix(layer)
    return torch.nn.functional.linear(x, weight, bias)


def numbered(names: Sequence[str]) -> str:
    """Return layers' names, those of experts by number: "experts 1, 5 of model.layers.0.mlp"."""
    experts: dict[str, list[str]] = {}
    alone: list[str] = []
    for name in names:
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            alone.append(name)
        elif expert["number"] not in experts.setdefault(expert["place"], []):
            experts[expert["place"]].append(expert["number"])
    phrases = [f"experts {', '.join(numbers)} of {parent}" for parent, numbers in experts.items()]
    return "; ".join(alone + phrases)
