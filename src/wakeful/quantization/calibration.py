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
from jaxtyping import Float
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.hooks import hooked
from wakeful.probes.running import logits_of
from wakeful.quantization.gradients import capture_output_gradients
from wakeful.quantization.layerwise import StopForward
from wakeful.quantization.linear import weight_and_bias
from wakeful.quantization.schemes.methods import InputStatistics, Readers
from wakeful.quantization.token_weights import TokenWeights, mean_square_per_token

_EXPERT = re.compile(r"(?P<parent>.+)\.experts\.(?:\w+\.)?(?P<number>\d+)(?:\..+)?")
"""The name of an expert's layer: the experts' parent, then a projection's list or the expert."""


@torch.no_grad()
def collect_statistics(
    model: nn.Module,
    layers: dict[str, nn.Module],
    calibration: Sequence[Tensor],
    *,
    gram: bool = False,
    weights: TokenWeights | None = None,
    weighs_by_gradient: bool = False,
    outputs: bool = False,
) -> dict[str, InputStatistics]:
    """Return statistics of each layer's inputs in the full-precision model on calibration tokens.

    Layers that read the same tensor share the statistics of it.

    Args:
        model: the model, which stays unchanged.
        layers: its linear layers by name.
        calibration: token ids (B, L), one batch after another.
        gram: also compute the inputs' Gram matrices XᵀX.
        weights: weights of the tokens in each layer's XᵀX; None for equal ones.
        weighs_by_gradient: compute such weights here, by a backward pass for each batch.
        outputs: also record the largest outputs, which multiplies every layer a second time.

    Raises:
        WakefulError: calibration text never reaches a layer.
    """
    collector = _Collector(
        layers, gram=gram, outputs=outputs, weights=weights, weighs_by_gradient=weighs_by_gradient
    )
    with ExitStack() as hooks:
        read = partial(logits_of, model)
        if weighs_by_gradient:
            gradients = capture_output_gradients(model, layers, collector.add_weighted_products)
            read = hooks.enter_context(gradients)
        hooks.enter_context(hooked(layers, after=collector.add_call))
        for index, tokens in enumerate(calibration):
            collector.begin_batch(index)
            with suppress(StopForward):
                read(tokens)
    unread = [name for name in layers if name not in collector.statistics]
    if unread:
        raise WakefulError(
            f"calibration text never reaches {format_layer_names(unread)}: give more "
            "--calibration_sequences, or leave them out with --skip"
        )
    return collector.statistics


class _Collector:
    """Statistics of layers' inputs, collected call by call (see `collect_statistics`)."""

    def __init__(
        self, layers: Mapping[str, nn.Module], *, gram: bool, outputs: bool,
        weights: TokenWeights | None, weighs_by_gradient: bool,
    ) -> None:  # fmt: skip
        """Prepare empty statistics; the arguments are those of `collect_statistics`."""
        self.layers, self.gram, self.outputs = layers, gram, outputs
        self.weights, self.weighs_by_gradient = weights or {}, weighs_by_gradient
        self.weighted = weighs_by_gradient or weights is not None  # each layer has its own XᵀX then
        self.statistics: dict[str, InputStatistics] = {}
        self._batch_index = 0
        self._calls = Counter[str]()
        self._waiting: dict[tuple[str, int], tuple[Tensor, InputStatistics]] = {}
        """Inputs by layer and call, until the gradient that weighs them is known."""
        self._inputs: list[tuple[weakref.ref[Tensor], InputStatistics]] = []
        """Weak references to this forward pass's inputs, each with the statistics it went into."""

    def begin_batch(self, index: int) -> None:
        """Prepare for the batch with this index; weights of tokens are looked up by it."""
        self._batch_index = index
        for records in (self._inputs, self._waiting, self._calls):
            records.clear()

    def add_call(self, name: str, args: tuple[Any, ...], _output: object) -> None:
        """Add one call of a layer to its statistics; a hook after the layer's forward.

        Where another layer has read the same tensor in this pass, and the two share statistics, the
        tensor is in them already. Only where tokens are weighted has each layer its own XᵀX.
        """
        layer, x = self.layers[name], args[0]
        shared = next((statistics for tensor, statistics in self._inputs if tensor() is x), None)
        statistics = self.statistics.get(name)
        if statistics is None:
            statistics = _new_statistics(layer, shared, gram=self.gram, own_gram=self.weighted)
            self.statistics[name] = statistics
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        call = self._calls[name]
        self._calls[name] += 1
        if self.weighs_by_gradient:  # which the backward pass will give
            self._waiting[name, call] = rows, statistics
        elif self.weighted:
            weights = self.weights[name][self._batch_index].get(call)
            if weights is not None:  # else the loss does not depend on this call
                _add_products(statistics, rows, weights)
        is_new = shared is None or shared.channel_max is not statistics.channel_max
        if is_new:
            torch.maximum(statistics.channel_max, rows.abs().amax(0), out=statistics.channel_max)
            if statistics.gram is not None and not self.weighted:
                statistics.gram += rows.T @ rows
        if self.outputs:
            largest = float(linear_product(layer, x).abs().max())
            statistics.output_max = max(statistics.output_max, largest)
        self._inputs = [entry for entry in self._inputs if entry[0]() is not None]  # still alive
        if shared is None:
            self._inputs.append((weakref.ref(x), statistics))

    def add_weighted_products(self, name: str, call: int, gradient: Tensor) -> None:
        """Add a call's inputs to XᵀX, weighted by the gradient (M, N) of the layer's output."""
        rows, statistics = self._waiting.pop((name, call))
        _add_products(statistics, rows, mean_square_per_token(gradient))


def _add_products(
    statistics: InputStatistics, rows: Float[Tensor, "M K"], weights: Float[Tensor, "M"]
) -> None:
    """Add Xᵀ diag(weights) X of input rows X to a layer's Gram matrix, if it has one."""
    if statistics.gram is not None:
        statistics.gram += rows.T @ (rows * weights.unsqueeze(1))


def _new_statistics(
    layer: nn.Module, shared: InputStatistics | None, *, gram: bool, own_gram: bool
) -> InputStatistics:
    """Return empty statistics of a layer, with a Gram matrix XᵀX if `gram`.

    If another layer reads the same tensor, its `shared` statistics are continued: their tensors are
    the same objects, except for the Gram matrix where each layer has its own (`own_gram`).
    """
    weight_max = weight_and_bias(layer)[0].detach().float().abs().amax(0)
    matrix = None
    if gram and (own_gram or shared is None):
        matrix = weight_max.new_zeros(len(weight_max), len(weight_max))
    if shared is None:
        return InputStatistics(torch.zeros_like(weight_max), 0.0, matrix, Readers(weight_max))
    # The largest |W| is of all layers that read the tensor.
    torch.maximum(shared.readers.weight_max, weight_max, out=shared.readers.weight_max)
    return replace(shared, output_max=0.0, gram=shared.gram if matrix is None else matrix)


def linear_product(layer: nn.Module, x: Tensor) -> Tensor:
    """Return x Wᵀ + b of a linear layer, without anything else that its forward does."""
    weight, bias = weight_and_bias(layer)
    return torch.nn.functional.linear(x, weight, bias)


def format_layer_names(names: Sequence[str]) -> str:
    """Return layers' names in words, experts by number: "experts 1, 5 of model.layers.0.mlp"."""
    numbers_by_parent: dict[str, list[str]] = {}
    other_names: list[str] = []
    for name in names:
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            other_names.append(name)
            continue
        numbers = numbers_by_parent.setdefault(expert["parent"], [])
        if expert["number"] not in numbers:  # an expert has several layers
            numbers.append(expert["number"])
    phrases = [
        f"experts {', '.join(numbers)} of {parent}" for parent, numbers in numbers_by_parent.items()
    ]
    return "; ".join(other_names + phrases)
