"""Time that quantizing and measuring take, from one forward of the model and a layer of each shape.

A forward of few tokens is timed rather than predicted: on one thread of an AMD EPYC SmolLM2 reaches
half as much again of a matrix product's speed as models do in the mean.
"""

import time
from collections import Counter
from collections.abc import Mapping

import torch
from jaxtyping import Int
from torch import Tensor, nn

from wakeful.device import synchronize
from wakeful.probes.running import first_target, logits_of
from wakeful.quantization.formats import fits
from wakeful.quantization.linear import matrix, quantized_forms
from wakeful.quantization.schemes import Scheme
from wakeful.quantization.schemes.methods import InputStatistics, Readers

_TOKENS = 128
"""Tokens of the forward that is timed."""
_SECONDS_TO_MEASURE = 5.0


@torch.inference_mode()
def forward_seconds(model: nn.Module, tokens: Int[Tensor, "1 L"]) -> float:
    """Return about how long a forward over one sequence takes, by one over its first tokens."""
    few = tokens[:, : first_target(model) + _TOKENS]
    logits_of(model, few[:, : first_target(model) + 1])  # what a first call builds
    start = time.perf_counter()
    logits_of(model, few)
    synchronize(tokens.device)
    return (time.perf_counter() - start) * tokens.shape[1] / few.shape[1]


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
