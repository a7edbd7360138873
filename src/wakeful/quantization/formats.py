"""Quantization of a model's layers to one or several formats, with calibration text.

Text is read once for all formats of the same method and rotation. The model stays unchanged.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.evaluating import evaluating
from wakeful.probes.experts import put
from wakeful.quantization.calibration import collect_statistics
from wakeful.quantization.layerwise import layers_by_block
from wakeful.quantization.linear import (
    QuantizedLinear,
    layer_divisor,
    quantize_layer_with_schemes,
    weight_and_bias,
    weight_to_round,
)
from wakeful.quantization.norm_readers import readers_of_norms, readers_of_tensors
from wakeful.quantization.schemes import Scheme
from wakeful.quantization.schemes.methods import InputStatistics
from wakeful.quantization.token_weights import TokenWeights, compute_token_weights
from wakeful.terminal.display import OnProgress, ignore_progress

LayersByFormat = dict[str, dict[str, QuantizedLinear]]
"""Quantized layers, by the name of the format and the name of the layer."""


def scheme_fits(layer: nn.Module, scheme: Scheme) -> bool:
    """Tell whether a scheme quantizes weights, and its groups and rotation divide the number of the
    layer's input channels.
    """
    in_features = weight_and_bias(layer)[0].shape[1]
    if scheme.weights is None or not rotation_fits(layer, scheme):
        return False
    return scheme.weights.has_whole_groups(in_features)


def rotation_fits(layer: nn.Module, scheme: Scheme) -> bool:
    """Tell whether a scheme has no rotation, or one whose size divides the number of the layer's
    input channels.
    """
    in_features = weight_and_bias(layer)[0].shape[1]
    return not scheme.rotation or in_features % scheme.rotation == 0


def matrix_bytes(scheme: Scheme, rows: int, columns: int) -> int:
    """Return the bytes that a weight (rows, columns), quantized by a scheme, takes in a file: its
    codes, scales and zero points, and a static scale of its layer's inputs.
    """
    grid = scheme.weights
    assert grid is not None
    bytes_per_row = math.ceil(columns * grid.stored_bits / 8)
    num_outer_scales = rows if grid.per == "channel" else 1  # those of whole rows, or of the tensor
    num_scales = num_outer_scales
    if grid.group:
        num_scales = rows * math.ceil(columns / grid.group)
    size = rows * bytes_per_row + num_scales * grid.scale_type.itemsize
    if not grid.symmetric:
        size += 4 * num_scales  # a zero point for each scale
    if grid.two_scales:
        size += 4 * num_outer_scales  # beside the groups' scales, which they multiply, float32
    if scheme.scales == "static":
        size += 4  # the scale of the inputs, float32
    return size


def quantize_layers(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    schemes: Mapping[str, Scheme],
    text: Sequence[Tensor],
    *,
    only_fitting: bool = False,
    on_progress: OnProgress = ignore_progress,
) -> LayersByFormat:
    """Return a model's layers quantized under each of several schemes, by scheme and layer name.

    A method rounds by the inputs that layers have in the full-precision model. A sequential method
    rounds by their inputs in the model whose earlier blocks are quantized already.

    Args:
        model: the model; after a sequential method too it has its own layers.
        layers: its layers to quantize, by name.
        schemes: the schemes by name.
        text: calibration token ids (B, L), read once for all schemes of one method and rotation.
        only_fitting: leave a layer out of the schemes that do not fit it (`scheme_fits`), instead
            of giving it a shorter last group.
        on_progress: called with the numbers of layers quantized and of all, each layer counted
            once per method and rotation.

    Raises:
        WakefulError: several schemes have the same sequential method and rotation, or calibration
            text does not suit the layers (`collect_statistics`) or the model
            (`compute_token_weights`).
    """
    formats: LayersByFormat = {scheme_name: {} for scheme_name in schemes}
    # Schemes of one method and rotation round the same weights by the same statistics.
    by_method: dict[tuple[str, int], dict[str, Scheme]] = {}
    for scheme_name, scheme in schemes.items():
        key = (str(scheme.method), scheme.rotation)
        by_method.setdefault(key, {})[scheme_name] = scheme
    num_quantized, total = 0, len(by_method) * len(layers)
    with evaluating(model):
        for method_schemes in by_method.values():
            rounding = _LayerRounding(model, layers, method_schemes, text, only_fitting)
            for layer_name, quantized_by_scheme in rounding.quantize_all():
                for scheme_name, quantized in quantized_by_scheme.items():
                    formats[scheme_name][layer_name] = quantized
                num_quantized += 1
                on_progress(num_quantized, total)
    return formats


@dataclass(frozen=True, eq=False)
class _LayerRounding:
    """Rounding of a model's layers under one or several schemes of one method and rotation."""

    model: nn.Module
    layers: Mapping[str, nn.Module]
    schemes: Mapping[str, Scheme]
    text: Sequence[Tensor]
    only_fitting: bool
    """True to leave layers out of the schemes that do not fit them."""

    def quantize_all(self) -> Iterator[tuple[str, dict[str, QuantizedLinear]]]:
        """Yield each layer's name with its quantized copies by scheme name.

        A sequential method puts each block's quantized layers into the model, so that later blocks
        read what these compute. At the end, after an error too, the model has its own layers again.

        Raises:
            WakefulError: the method is sequential, and there are several schemes.
        """
        model, layers, method = self.model, self.layers, self._scheme_list[0].rounding
        if method.sequential and len(self.schemes) > 1:
            raise WakefulError(f"{method} rounds block after block, one format at a time")
        token_weights = None
        if method.weighting == "loss":
            token_weights = compute_token_weights(model, layers, self.text)
        norm_readers: set[str] = set()
        if method.norms:  # it divides the inputs of no other layers
            norm_readers.update(*readers_of_norms(model).values())
        names_sharing_scale = self._layers_sharing_outer_scale()
        try:
            for group in self._layer_groups():
                statistics = self._collect_statistics(group, token_weights)
                for name, layer_statistics in statistics.items():
                    layer_statistics.reads_norm = not method.norms or name in norm_readers
                replacements: dict[str, nn.Module] = {}
                for name, layer in group.items():
                    names = names_sharing_scale.get(name, ())
                    max_weight = self._shared_max_weight(names, statistics)
                    quantized = self._quantize_layer(layer, statistics.get(name), max_weight)
                    # The only copy of a sequential method, or the layer itself if no scheme fits.
                    replacements[name] = next(iter(quantized.values()), layer)
                    yield name, quantized
                if method.sequential:
                    put(model, replacements)
        finally:
            put(model, layers)

    def _layer_groups(self) -> Iterator[dict[str, nn.Module]]:
        """Yield groups of layers, by name, whose statistics are collected in one pass each.

        A method that needs XᵀX of each layer's inputs has groups of layers whose products fit
        memory together, in the order of the blocks. Other methods have one group of all layers.
        """
        method = self._scheme_list[0].rounding
        if not method.needs_gram:
            return iter([dict(self.layers)])
        return layers_by_block(self.model, self.layers, self.text, rerun_blocks=method.sequential)

    @property
    def _scheme_list(self) -> list[Scheme]:
        return list(self.schemes.values())

    def _collect_statistics(
        self, layers: dict[str, nn.Module], weights: TokenWeights | None
    ) -> dict[str, InputStatistics]:
        """Return statistics of calibration text at these layers, by layer name.

        The result is empty if no scheme needs statistics. `weights` are the tokens' weights in XᵀX;
        None for equal ones.
        """
        schemes = self._scheme_list  # of one method
        static = any(scheme.scales == "static" for scheme in schemes)
        if not static and schemes[0].method is None:
            return {}
        return collect_statistics(
            self.model, layers, self.text, weights=weights,
            gram=schemes[0].rounding.needs_gram,
            outputs=static and any(scheme.outputs for scheme in schemes),
        )  # fmt: skip

    def _quantize_layer(
        self, layer: nn.Module, statistics: InputStatistics | None, max_weight: Tensor | None
    ) -> dict[str, QuantizedLinear]:
        """Return a layer quantized under each scheme, or, with `only_fitting`, under each that fits
        it; by scheme name.

        `max_weight` (1, 1) is the largest |W| over all layers that share an outer scale with this
        one; None if it shares none.
        """
        schemes = {
            name: scheme for name, scheme in self.schemes.items()
            if not self.only_fitting or scheme_fits(layer, scheme)
        }  # fmt: skip
        quantized = quantize_layer_with_schemes(
            layer, list(schemes.values()), statistics, max_weight
        )
        return dict(zip(schemes, quantized, strict=True))

    def _layers_sharing_outer_scale(self) -> dict[str, list[str]]:
        """Return, by the name of a layer, the names of all layers with which it shares an outer
        scale, its own included: those that read the same tensor.

        The result is empty if no scheme has an outer scale per tensor.
        """
        grids = [scheme.weights for scheme in self._scheme_list]
        if not any(grid and grid.shares_outer_scale for grid in grids):
            return {}
        names_by_layer: dict[str, list[str]] = {}
        for names in readers_of_tensors(self.model):  # the readers of one tensor
            names_by_layer |= dict.fromkeys(names, names)
        return names_by_layer

    def _shared_max_weight(
        self, names: Sequence[str], statistics: Mapping[str, InputStatistics]
    ) -> Tensor | None:
        """Return the largest |W| over the named layers as a tensor (1, 1); None if there are none.

        Layers that are not to be quantized do not count. Weights are taken as they will be rounded,
        multiplied by the divisors of their inputs and rotated.
        """
        scheme, maxima = self._scheme_list[0], list[Tensor]()
        for name in names:
            if name in self.layers and rotation_fits(self.layers[name], scheme):
                divisor = layer_divisor(scheme, statistics.get(name))
                with torch.no_grad():
                    weight = weight_to_round(self.layers[name], scheme, divisor).detach()
                    maxima.append(weight.float().abs().max())
        return torch.stack(maxima).max().reshape(1, 1) if maxima else None
