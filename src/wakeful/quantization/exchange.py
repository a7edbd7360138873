"""Linear layers of one scheme in a model, looked at and quantized part by part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wakeful.probes.experts import put
from wakeful.quantization.arithmetic import Arithmetic
from wakeful.quantization.layerwise import fit, portions
from wakeful.quantization.linear import QuantizedLinear, divisor_of, matrix, quantized
from wakeful.quantization.norm_readers import readers_of_norms, readers_of_tensors
from wakeful.quantization.observing import observe
from wakeful.quantization.schemes import Scheme
from wakeful.quantization.schemes.methods import InputStatistics
from wakeful.quantization.weighing import TokenWeights, token_weights


@dataclass(eq=False)
class Exchange:
    """Puts the quantized forms of layers into `replaced`, by what calibration text shows of them.

    The model is as it was when that is done.
    """

    model: nn.Module
    layers: Mapping[str, nn.Module]
    scheme: Scheme
    arithmetic: Arithmetic
    text: Sequence[Tensor]
    replaced: dict[int, QuantizedLinear]
    """By the ids of the layers in full precision."""
    passed: Callable[[], None]
    """Called after every layer."""
    statistics: dict[str, InputStatistics] = field(default_factory=dict)
    """Statistics of the text at the layers that are quantized now."""
    beside: dict[str, list[str]] = field(default_factory=dict)
    """The layers that share a scale with each, where they do."""

    def run(self) -> None:
        """Quantize all of the layers."""
        try:
            self._exchange()
        finally:
            put(self.model, self.layers)

    def _exchange(self) -> None:
        """Leave quantized layers in the model, where later ones are to read what they give."""
        model, layers, scheme, text = self.model, self.layers, self.scheme, self.text
        grid, method = scheme.weights, scheme.rounding
        joined = grid is not None and grid.two_scales and grid.per == "tensor"
        self.beside = {
            name: names for names in (readers_of_tensors(model) if joined else []) for name in names
        }
        weights, parts = None, iter([layers])
        weighs = method.weighs_tokens and not method.sequential and fit(layers)
        if method.needs_products:
            if method.weighs_tokens and not weighs:
                weights = token_weights(model, layers, text)
            parts = portions(model, layers, text, follows=method.sequential)
        fed = None
        if method.norms:
            fed = {name for readers in readers_of_norms(model).values() for name in readers}
        for part in parts:
            self.statistics = self._observe(part, weights, weighs=weighs)
            for name, layer_statistics in self.statistics.items():
                layer_statistics.of_norm = fed is None or name in fed
            forms = {name: self.make(name) for name in part}
            if method.sequential:
                put(model, forms)

    def make(self, name: str) -> QuantizedLinear:
        """Return a layer's quantized form."""
        layer = self.layers[name]
        largest = self._largest(self.beside[name]) if name in self.beside else None
        form = quantized(layer, self.scheme, self.arithmetic, self.statistics.get(name), largest)
        self.replaced[id(layer)] = form
        self.passed()
        return form

    def _observe(
        self, part: Mapping[str, nn.Module], weights: TokenWeights | None = None,
        *, weighs: bool = False,
    ) -> dict[str, InputStatistics]:  # fmt: skip
        """Return what the text shows of some layers, where that is asked for."""
        method, static = self.scheme.rounding, self.scheme.scales == "static"
        if not static and self.scheme.method is None:
            return {}
        return observe(
            self.model, dict(part), self.text, weights=weights, weighs=weighs,
            products=method.needs_products, outputs=static and self.scheme.outputs is not None,
        )  # fmt: skip

    def _largest(self, names: Sequence[str]) -> Tensor:
        """Return the largest |W| of layers that share a scale, (1, 1)."""
        peaks: list[Tensor] = []
        for name in names:
            if name in self.layers:
                weight = matrix(self.layers[name])[0].detach().float()
                divisor = divisor_of(self.scheme, self.statistics.get(name))
                peaks.append((weight if divisor is None else weight * divisor).abs().max())
        return torch.stack(peaks).max().reshape(1, 1)
