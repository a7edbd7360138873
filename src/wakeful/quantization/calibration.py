"""Statistics of calibration text at linear layers, recorded by hooks."""

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.hooks import hooked
from wakeful.probes.running import logits_of
from wakeful.quantization.layerwise import StopForward
from wakeful.quantization.linear import weight_and_bias
from wakeful.quantization.schemes.methods import InputStatistics
from wakeful.quantization.token_weights import TokenWeights


@torch.no_grad()
def collect_statistics(
    model: nn.Module,
    layers: dict[str, nn.Module],
    calibration: Sequence[Tensor],
    *,
    gram: bool = False,
    weights: TokenWeights | None = None,
    outputs: bool = False,
) -> dict[str, InputStatistics]:
    """Return statistics of each layer's inputs in a model on calibration tokens, by layer name.

    Layers that read the same tensor share the statistics of it.

    Args:
        model: the model, which stays unchanged.
        layers: its linear layers by name.
        calibration: token ids (B, L), one batch after another.
        gram: also compute the inputs' Gram matrices XᵀX.
        weights: weights of the tokens in each layer's XᵀX; None for equal ones.
        outputs: also record the largest outputs, which multiplies every layer a second time.

    Raises:
        WakefulError: calibration text never reaches a layer, such as an expert.
    """
    collector = _Collector(layers, gram=gram, outputs=outputs, weights=weights)
    with hooked(layers, after=collector.add_call):
        for index, tokens in enumerate(calibration):
            collector.begin_batch(index)
            with suppress(StopForward):  # by which `layerwise` ends a pass after one block
                logits_of(model, tokens)
    unread = [name for name in layers if name not in collector.statistics]
    if unread:
        raise WakefulError(
            f"calibration text never reaches {len(unread)} layers, such as {unread[0]}: give more "
            "--calibration_sequences, or leave them out with --skip"
        )
    return collector.statistics


class _Collector:
    """Statistics of layers' inputs, collected call by call (see `collect_statistics`)."""

    def __init__(
        self, layers: Mapping[str, nn.Module], *, gram: bool, outputs: bool,
        weights: TokenWeights | None,
    ) -> None:  # fmt: skip
        """Prepare empty statistics; the arguments are those of `collect_statistics`."""
        self.layers, self.gram, self.outputs = layers, gram, outputs
        self.weights = weights  # with which each layer has its own XᵀX
        self.statistics: dict[str, InputStatistics] = {}
        self._batch_index = 0
        self._calls = Counter[str]()
        self._inputs: list[tuple[weakref.ref[Tensor], InputStatistics]] = []
        """Weak references to this forward pass's inputs, each with the statistics it went into."""

    def begin_batch(self, index: int) -> None:
        """Prepare for the batch with this index; weights of tokens are looked up by it."""
        self._batch_index = index
        self._inputs.clear()
        self._calls.clear()

    def add_call(self, name: str, args: tuple[Any, ...], _output: object) -> None:
        """Add the inputs of one call of a layer to its statistics; a hook after its forward.

        Layers that read the same tensor share statistics, to which it is added once. Only where
        tokens are weighted does each layer have its own XᵀX.
        """
        layer, x = self.layers[name], args[0]
        # Statistics of another layer that has read this very tensor in this pass, if there is one.
        shared = next((statistics for tensor, statistics in self._inputs if tensor() is x), None)
        statistics = self.statistics.get(name)
        if statistics is None:
            own_gram = self.weights is not None
            statistics = _new_statistics(layer, shared, gram=self.gram, own_gram=own_gram)
            self.statistics[name] = statistics
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        call = self._calls[name]
        self._calls[name] += 1
        if self.weights is not None and statistics.gram is not None:
            weights = self.weights[name][self._batch_index].get(call)
            if weights is not None:  # else the loss does not depend on this call
                statistics.gram += rows.T @ (rows * weights.unsqueeze(1))
        # Two layers that read one tensor now have separate statistics if they read different ones
        # when these were created.
        is_new = shared is None or shared.channel_max is not statistics.channel_max
        if is_new:
            torch.maximum(statistics.channel_max, rows.abs().amax(0), out=statistics.channel_max)
            if statistics.gram is not None and self.weights is None:
                statistics.gram += rows.T @ rows
        if self.outputs:
            largest = float(linear_product(layer, x).abs().max())
            statistics.output_max = max(statistics.output_max, largest)
        self._inputs = [entry for entry in self._inputs if entry[0]() is not None]  # still alive
        if shared is None:
            self._inputs.append((weakref.ref(x), statistics))


def _new_statistics(
    layer: nn.Module, shared: InputStatistics | None, *, gram: bool, own_gram: bool
) -> InputStatistics:
    """Return statistics for a layer, with a Gram matrix XᵀX if `gram`.

    They are empty unless another layer reads the same tensor: then they hold the very tensors of
    its `shared` statistics, except for an own Gram matrix if `own_gram`. The shared largest |W| is
    raised, in place, to that of this layer.
    """
    weight_max = weight_and_bias(layer)[0].detach().float().abs().amax(0)
    new_gram = None
    if gram and (own_gram or shared is None):
        new_gram = weight_max.new_zeros(len(weight_max), len(weight_max))
    if shared is None:
        return InputStatistics(torch.zeros_like(weight_max), 0.0, new_gram, weight_max)
    torch.maximum(shared.weight_max, weight_max, out=shared.weight_max)
    return replace(shared, output_max=0.0, gram=shared.gram if new_gram is None else new_gram)


def linear_product(layer: nn.Module, x: Tensor) -> Tensor:
    """Return x Wᵀ + b of a linear layer, without anything else that its forward does."""
    weight, bias = weight_and_bias(layer)
    return torch.nn.functional.linear(x, weight, bias)
