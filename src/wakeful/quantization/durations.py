"""Estimated seconds of quantizing and measuring, from one forward pass and a layer of each shape.

A forward pass over few tokens is timed, not predicted: on one thread of an AMD EPYC SmolLM2 reaches
1.5 times the share of a matrix product's speed that models reach on average.
"""

import time
from collections import Counter
from collections.abc import Mapping

import torch
from jaxtyping import Int
from torch import Tensor, nn

from wakeful.device import synchronize
from wakeful.probes.running import logits_of
from wakeful.quantization.formats import scheme_fits
from wakeful.quantization.linear import quantize_layer_with_schemes, weight_and_bias
from wakeful.quantization.schemes import Scheme
from wakeful.quantization.schemes.methods import InputStatistics, Readers

_TOKENS = 128
"""Tokens of the forward pass that is timed."""
_SECONDS_TO_MEASURE = 5.0


@torch.inference_mode()
def estimate_forward_seconds(model: nn.Module, tokens: Int[Tensor, "1 L"]) -> float:
    """Estimate how long a forward pass over one sequence takes, by timing one over its beginning.

    A shorter pass comes first, so that one-time work of a first call is not timed.
    """
    start_of_text = tokens[:, :_TOKENS]
    logits_of(model, start_of_text[:, :2])
    start = time.perf_counter()
    logits_of(model, start_of_text)
    synchronize(tokens.device)
    return (time.perf_counter() - start) * tokens.shape[1] / start_of_text.shape[1]


def estimate_rounding_seconds(
    layers: Mapping[str, nn.Module], schemes: Mapping[str, Scheme]
) -> float:
    """Estimate how long rounding all layers in all schemes takes, without running the text.

    One layer (N, K) of each shape is rounded and timed, the smallest first, for a few seconds in
    all; the time of larger shapes is extrapolated in proportion to N·K².
    """
    counts = Counter(tuple(weight_and_bias(layer)[0].shape) for layer in layers.values())
    layer_by_shape = {tuple(weight_and_bias(layer)[0].shape): layer for layer in layers.values()}
    total, measuring, seconds_per_unit = 0.0, 0.0, 0.0
    for height, width in sorted(counts, key=lambda shape: shape[0] * shape[1] ** 2):
        units = height * width**2
        if measuring < _SECONDS_TO_MEASURE:
            layer = layer_by_shape[height, width]
            start = time.perf_counter()
            # The time does not depend on the statistics: XᵀX may be the identity.
            ones = weight_and_bias(layer)[0].new_ones(width)
            statistics = InputStatistics(ones, 0.0, ones.diag(), Readers(ones))
            fitting = [scheme for scheme in schemes.values() if scheme_fits(layer, scheme)]
            quantize_layer_with_schemes(layer, fitting, "integer", statistics)
            seconds = time.perf_counter() - start
            measuring += seconds
            seconds_per_unit = seconds / units
        total += counts[height, width] * seconds_per_unit * units
    return total
