"""A model's layers in one or several formats, rounded by what calibration text shows of them.

Text is read once for all formats that round by the same method. The model stays as it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.evaluating import evaluating
from wakeful.probes.experts import put
from wakeful.quantization.arithmetic import Arithmetic
from wakeful.quantization.layerwise import fit, portions
from wakeful.quantization.linear import QuantizedLinear, divisor_of, matrix, quantized_forms
from wakeful.quantization.norm_readers import readers_of_norms, readers_of_tensors
from wakeful.quantization.observing import observe
from wakeful.quantization.schemes import Scheme
from wakeful.quantization.schemes.methods import InputStatistics
from wakeful.quantization.weighing import token_weights
from wakeful.terminal.display import OnProgress, ignore_progress

Formats = dict[str, dict[str, QuantizedLinear]]
"""The quantized form of each layer, by the names of formats and layers."""


def fits(layer: nn.Module, scheme: Scheme) -> bool:
    """Tell whether a layer's inputs are whole groups of a format."""
    return scheme.weights is not None and scheme.weights.divides(matrix(layer)[0].shape[1])


def format_bytes(scheme: Scheme, rows: int, columns: int) -> int:
    """Return the bytes that the numbers and scales of a matrix take in a file."""
    grid = scheme.weights
    assert grid is not None
    shared = rows if grid.per == "channel" else 1
    scales = rows * -(-columns // grid.group) if grid.group else shared
    size = rows * -(-columns * grid.stored_bits // 8) + scales * grid.scale_type.itemsize
    size += 0 if grid.symmetric else 4 * scales
    size += 4 * shared if grid.two_scales else 0
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
) -> Formats:
    """Return the layers of a model under each of several schemes; with `whole_groups` those alone
    that a scheme `fits`.

    What is rounded by a method sees the model in full precision, or by a sequential one, of which
    there is one scheme at a time, the blocks before as they are quantized.
    """
    formats: dict[str, dict[str, QuantizedLinear]] = {name: {} for name in schemes}
    by_method: dict[str, dict[str, Scheme]] = {}
    for name, scheme in schemes.items():
        by_method.setdefault(str(scheme.method), {})[name] = scheme
    done, count = 0, len(by_method) * len(layers)
    with evaluating(model):
        for part in by_method.values():
            rounding = _Rounding(model, layers, part, text, arithmetic, whole_groups)
            for layer_name, forms in rounding.forms():
                for name, form in forms.items():
                    formats[name][layer_name] = form
                done += 1
                on_progress(done, count)
    return formats


@dataclass(frozen=True, eq=False)
class _Rounding:
    """Rounding of layers under schemes of one method."""

    model: nn.Module
    layers: Mapping[str, nn.Module]
    schemes: Mapping[str, Scheme]
    text: Sequence[Tensor]
    arithmetic: Arithmetic
    whole_groups: bool

    def forms(self) -> Iterator[tuple[str, dict[str, QuantizedLinear]]]:
        """Yield each layer's name with its forms; the model is as it was when that is done."""
        model, layers = self.model, self.layers
        first = next(iter(self.schemes.values()))
        method, static = first.rounding, any(each.scales == "static" for each in self._schemes)
        if method.sequential and len(self.schemes) > 1:
            raise WakefulError(f"{method} rounds block after block, one format at a time")
        weights, parts = None, iter([dict(layers)])
        weighs = method.weighs_tokens and not method.sequential and fit(layers)
        if method.needs_products:
            if method.weighs_tokens and not weighs:
                weights = token_weights(model, layers, self.text)
            parts = portions(model, layers, self.text, follows=method.sequential)
        of_norms = {
            name for names in (readers_of_norms(model).values() if method.norms else ())
            for name in names
        }  # fmt: skip
        beside = self._beside()
        try:
            for part in parts:
                statistics: dict[str, InputStatistics] = {}
                if static or first.method is not None:
                    statistics = observe(
                        model, part, self.text, weights=weights, weighs=weighs,
                        products=method.needs_products,
                        outputs=static and any(each.outputs for each in self._schemes),
                    )  # fmt: skip
                for name, seen in statistics.items():
                    seen.of_norm = not method.norms or name in of_norms
                exchanged: dict[str, nn.Module] = {}
                for name, layer in part.items():
                    largest = self._largest(beside.get(name, ()), statistics)
                    forms = self._forms(layer, statistics.get(name), largest)
                    exchanged[name] = next(iter(forms.values()), layer)
                    yield name, forms
                if method.sequential:
                    put(model, exchanged)
        finally:
            put(model, layers)

    @property
    def _schemes(self) -> list[Scheme]:
        return list(self.schemes.values())

    def _forms(
        self, layer: nn.Module, statistics: InputStatistics | None, largest: Tensor | None
    ) -> dict[str, QuantizedLinear]:
        """Return a layer's forms by the names of schemes."""
        schemes = {
            name: scheme for name, scheme in self.schemes.items()
            if not self.whole_groups or fits(layer, scheme)
        }  # fmt: skip
        values = list(schemes.values())
        forms = quantized_forms(layer, values, self.arithmetic, statistics, largest)
        return dict(zip(schemes, forms, strict=True))

    def _beside(self) -> dict[str, list[str]]:
        """Return the layers that share a scale with each, where a format has such."""
        grids = [scheme.weights for scheme in self._schemes]
        if not any(grid and grid.two_scales and grid.per == "tensor" for grid in grids):
            return {}
        return {name: names for names in readers_of_tensors(self.model) for name in names}

    def _largest(
        self, names: Sequence[str], statistics: Mapping[str, InputStatistics]
    ) -> Tensor | None:
        """Return the largest |W| of layers that share a scale, (1, 1); None of none."""
        peaks: list[Tensor] = []
        for name in names:
            if name in self.layers:
                weight = matrix(self.layers[name])[0].detach().float()
                divisor = divisor_of(self._schemes[0], statistics.get(name))
                peaks.append((weight if divisor is None else weight * divisor).abs().max())
        return torch.stack(peaks).max().reshape(1, 1) if peaks else None
