"""A model's layers in several formats at once, of which each layer may take one.

Calibration text is read once for all formats that round by the same method.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.evaluating import evaluating
from wakeful.quantization.arithmetic import Arithmetic
from wakeful.quantization.layerwise import fit, portions
from wakeful.quantization.linear import QuantizedLinear, matrix, quantized_forms
from wakeful.quantization.observing import observe
from wakeful.quantization.schemes import Absmax, Scheme
from wakeful.quantization.schemes.methods import Gptq, InputStatistics, Readers
from wakeful.quantization.weighing import token_weights
from wakeful.terminal.display import OnProgress, ignore_progress

Formats = Mapping[str, Mapping[str, QuantizedLinear]]
"""The quantized form of each layer, by the names of formats and layers."""
_SECONDS_TO_MEASURE = 5.0


def _four_bits(group: int) -> Scheme:
    grid = Absmax(bits=4, per="channel", group=group, scale="bfloat16")
    return Scheme(weights=grid, method=Gptq())


VLLM: Mapping[str, Scheme] = {
    "W4A16 in groups of 128": _four_bits(128),
    "W4A16 in groups of 64": _four_bits(64),
    "W4A16 in groups of 32": _four_bits(32),
    "W8A16": Scheme(weights=Absmax(bits=8, per="channel", scale="bfloat16")),
}
"""The formats of weights that vLLM runs, the smallest first, with scales of bfloat16."""


def fits(layer: nn.Module, scheme: Scheme) -> bool:
    """Tell whether a layer's inputs are whole groups of a format."""
    return scheme.weights is not None and scheme.weights.divides(matrix(layer)[0].shape[1])


def quantize_formats(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    schemes: Mapping[str, Scheme],
    text: Sequence[Tensor],
    *,
    arithmetic: Arithmetic = "integer",
    on_progress: OnProgress = ignore_progress,
) -> Formats:
    """Return the layers of a model in each of several formats of weights alone, where they fit.

    What is rounded by a method sees the model in full precision. The model stays as it is.

    Raises:
        WakefulError: a format quantizes more than weights, or rounds block after block.
    """
    for scheme in schemes.values():
        method = scheme.rounding
        if scheme.activations or scheme.cache or method.sequential or method.divides:
            raise WakefulError(f"{scheme} is no format of weights alone")
    formats: dict[str, dict[str, QuantizedLinear]] = {name: {} for name in schemes}
    calibrated = [scheme for scheme in schemes.values() if scheme.method is not None]
    done = 0
    with evaluating(model):
        together = fit(layers)
        weighed = any(scheme.rounding.weighs_tokens for scheme in calibrated)
        weights = token_weights(model, layers, text) if weighed and not together else None
        for part in portions(model, layers, text) if calibrated else [dict(layers)]:
            statistics = {}
            if calibrated:
                statistics = observe(
                    model, part, text, products=True,
                    weights=weights, weighs=weighed and together,
                )  # fmt: skip
            for layer_name, layer in part.items():
                fitting = {name: schemes[name] for name in schemes if fits(layer, schemes[name])}
                forms = quantized_forms(
                    layer, list(fitting.values()), arithmetic, statistics.get(layer_name)
                )
                for name, form in zip(fitting, forms, strict=True):
                    formats[name][layer_name] = form
                done += 1
                on_progress(done, len(layers))
    return formats


def rounding_seconds(layers: Mapping[str, nn.Module], schemes: Mapping[str, Scheme]) -> float:
    """Return about how long it takes to round layers in all formats, text aside.

    One layer of each shape is rounded, the smallest first, for a few seconds in all; larger ones
    are taken to need N·K² as much.
    """
    shapes = Counter(tuple(matrix(layer)[0].shape) for layer in layers.values())
    by_shape = {tuple(matrix(layer)[0].shape): layer for layer in layers.values()}
    total, spent, rate = 0.0, 0.0, 0.0
    for height, width in sorted(shapes, key=lambda shape: shape[0] * shape[1] ** 2):
        if spent < _SECONDS_TO_MEASURE:
            layer = by_shape[height, width]
            start = time.perf_counter()
            top = matrix(layer)[0].new_ones(width)
            statistics = InputStatistics(top, 0.0, top.diag(), Readers(top))
            fitting = [scheme for scheme in schemes.values() if fits(layer, scheme)]
            quantized_forms(layer, fitting, "integer", statistics)
            seconds = time.perf_counter() - start
            spent, rate = spent + seconds, seconds / (height * width**2)
        total += shapes[height, width] * rate * height * width**2
    return total
