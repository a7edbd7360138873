"""Quantization of a model's layers to one or several formats, with calibration text.

Text is read once for all formats of the same method. The model stays unchanged.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.evaluating import evaluating
from wakeful.probes.experts import put
from wakeful.quantization.arithmetic import Arithmetic
from wakeful.quantization.calibration import collect_statistics
from wakeful.quantization.layerwise import layers_by_block, products_fit_memory
from wakeful.quantization.linear import (
    QuantizedLinear,
    layer_divisor,
    quantize_layer_with_schemes,
    weight_and_bias,
)
from wakeful.quantization.norm_readers import readers_of_norms, readers_of_tensors
from wakeful.quantization.schemes import Scheme
from wakeful.quantization.schemes.methods import InputStatistics
from wakeful.quantization.token_weights import TokenWeights, compute_token_weights
from wakeful.terminal.display import OnProgress, ignore_progress

LayersByFormat = dict[str, dict[str, QuantizedLinear]]
"""Quantized layers, by the name of the format and the name of the layer."""


def scheme_fits(layer: nn.Module, scheme: Scheme) -> bool:
    """Tell whether a layer's input channels are a whole number of the scheme's groups."""
    return scheme.weights is not None and scheme.weights.has_whole_groups(
        weight_and_bias(layer)[0].shape[1]
    )


def matrix_bytes(scheme: Scheme, rows: int, columns: int) -> int:
    """Return the bytes that a weight's codes and scales take in a file."""
    grid = scheme.weights
    assert grid is not None
    num_outer_scales = rows if grid.per == "channel" else 1
    num_scales = rows * -(-columns // grid.group) if grid.group else num_outer_scales
    size = rows * -(-columns * grid.stored_bits // 8) + num_scales * grid.scale_type.itemsize
    size += 0 if grid.symmetric else 4 * num_scales  # zero points
    size += 4 * num_outer_scales if grid.two_scales else 0
    return size + 4 * (scheme.scales == "static")


def quantize_layers(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    schemes: Mapping[str, Scheme],
    text: Sequence[Tensor],
    *,
    arithmetic: Arithmetic = "integer",
    whole_groups: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> LayersByFormat:
    """Return a model's layers quantized under each of several schemes, by scheme and layer name.

    `text` holds calibration token ids (B, L), read once for all schemes of one method. Methods see
    the inputs of the full-precision model; a sequential method, which allows one scheme only, sees
    those of the model whose earlier blocks are quantized. With `whole_groups`, a layer whose width
    is no multiple of a scheme's groups is left out.
    """
    formats: LayersByFormat = {name: {} for name in schemes}
    by_method: dict[str, dict[str, Scheme]] = {}
    for name, scheme in schemes.items():
        by_method.setdefault(str(scheme.method), {})[name] = scheme
    done, total = 0, len(by_method) * len(layers)
    with evaluating(model):
        for method_schemes in by_method.values():
            rounding = _LayerRounding(model, layers, method_schemes, text, arithmetic, whole_groups)
            for layer_name, quantized in rounding.quantize_all():
                for name, layer in quantized.items():
                    formats[name][layer_name] = layer
                done += 1
                on_progress(done, total)
    return formats


@dataclass(frozen=True, eq=False)
class _LayerRounding:
    """Rounding of a model's layers under one or several schemes of one method."""

    model: nn.Module
    layers: Mapping[str, nn.Module]
    schemes: Mapping[str, Scheme]
    text: Sequence[Tensor]
    arithmetic: Arithmetic
    whole_groups: bool

    def quantize_all(self) -> Iterator[tuple[str, dict[str, QuantizedLinear]]]:
        """Yield each layer's name with its quantized copies by scheme name.

        A sequential method puts them into the model for a while; at the end it is as before.
        """
        model, layers, method = self.model, self.layers, self._scheme_list[0].rounding
        if method.sequential and len(self.schemes) > 1:
            raise WakefulError(f"{method} rounds block after block, one format at a time")
        token_weights = None
        layer_groups = iter([dict(layers)])
        weighs_by_gradient = (
            method.weighs_tokens and not method.sequential and products_fit_memory(layers)
        )
        if method.needs_gram:
            if method.weighs_tokens and not weighs_by_gradient:
                token_weights = compute_token_weights(model, layers, self.text)
            layer_groups = layers_by_block(model, layers, self.text, rerun_blocks=method.sequential)
        norm_readers: set[str] = set()
        if method.norms:
            norm_readers.update(*readers_of_norms(model).values())
        sharing = self._layers_sharing_outer_scale()
        try:
            for group in layer_groups:
                statistics = self._collect_statistics(group, token_weights, weighs_by_gradient)
                for name, layer_statistics in statistics.items():
                    layer_statistics.reads_norm = not method.norms or name in norm_readers
                replacements: dict[str, nn.Module] = {}
                for name, layer in group.items():
                    max_weight = self._shared_max_weight(sharing.get(name, ()), statistics)
                    quantized = self._quantize_layer(layer, statistics.get(name), max_weight)
                    replacements[name] = next(iter(quantized.values()), layer)
                    yield name, quantized
                if method.sequential:
                    put(model, replacements)
        finally:
            put(model, layers)

    @property
    def _scheme_list(self) -> list[Scheme]:
        return list(self.schemes.values())

    def _collect_statistics(
        self, layers: dict[str, nn.Module], weights: TokenWeights | None, weighs_by_gradient: bool
    ) -> dict[str, InputStatistics]:
        """Return what the schemes need to know of calibration text at some layers, if anything."""
        schemes = self._scheme_list
        static = any(scheme.scales == "static" for scheme in schemes)
        if not static and schemes[0].method is None:
            return {}
        return collect_statistics(
            self.model, layers, self.text, weights=weights, weighs_by_gradient=weighs_by_gradient,
            gram=schemes[0].rounding.needs_gram,
            outputs=static and any(scheme.outputs for scheme in schemes),
        )  # fmt: skip

    def _quantize_layer(
        self, layer: nn.Module, statistics: InputStatistics | None, max_weight: Tensor | None
    ) -> dict[str, QuantizedLinear]:
        """Return a layer quantized under each scheme that fits it, by scheme name."""
        schemes = {
            name: scheme for name, scheme in self.schemes.items()
            if not self.whole_groups or scheme_fits(layer, scheme)
        }  # fmt: skip
        quantized = quantize_layer_with_schemes(
            layer, list(schemes.values()), self.arithmetic, statistics, max_weight
        )
        return dict(zip(schemes, quantized, strict=True))

    def _layers_sharing_outer_scale(self) -> dict[str, list[str]]:
        """Return for each layer the names of all that read the same tensor, itself included.

        They share an outer scale; empty where no scheme has an outer scale per tensor.
        """
        grids = [scheme.weights for scheme in self._scheme_list]
        if not any(grid and grid.two_scales and grid.per == "tensor" for grid in grids):
            return {}
        return {name: names for names in readers_of_tensors(self.model) for name in names}

    def _shared_max_weight(
        self, names: Sequence[str], statistics: Mapping[str, InputStatistics]
    ) -> Tensor | None:
        """Return the largest |W| over several layers as a tensor (1, 1); None if `names` is empty.

        Weights are multiplied by the divisors of their inputs first.
        """
        maxima: list[Tensor] = []
        for name in names:
            if name in self.layers:
                weight = weight_and_bias(self.layers[name])[0].detach().float()
                divisor = layer_divisor(self._scheme_list[0], statistics.get(name))
                maxima.append((weight if divisor is None else weight * divisor).abs().max())
        return torch.stack(maxima).max().reshape(1, 1) if maxima else None
