"""Tuning of what a quantized file holds: scales, trained by KL with the codes fixed.

With codes q of layer W and scales s, Ŵ = q·s; s = s₀·exp(θ), θ trained by Adam on

    KL(p ‖ p̂) per predicted token, p of the model in full precision

(EfficientQAT's second stage, 2407.11062, end to end). Scales are rounded as the file stores them
in every step, with the gradient of the identity. Teacher and student are both in memory.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.estimates import Estimate, mean_and_error, reach
from wakeful.model.evaluating import evaluating
from wakeful.quantization.convert import quantized_layers
from wakeful.quantization.linear import QuantizedLinear
from wakeful.quantization.measure import divergences, predicted
from wakeful.quantization.schemes import Absmax

RATE = 1e-3
"""Adam's rate for logarithms of scales."""


@dataclass(frozen=True)
class Tuning:
    """Effect of tuning on text that trained nothing."""

    steps: int
    before: Estimate
    """KL from the model in full precision, nats per token."""
    after: Estimate
    kept: bool
    """True where the tuned scales stay: KL falls by more than its 95% interval, paired."""


def tune_scales(
    model: nn.Module,
    small: nn.Module,
    text: Sequence[Int[Tensor, "1 L"]],
    check: Sequence[Int[Tensor, "1 L"]],
    *,
    steps: int,
    rate: float = RATE,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Tuning:
    """Train the scales of `small`, made of `model`, in place; each step reads one sequence.

    The untuned scales stay unless KL on `check` falls by more than its paired interval.
    """
    layers = {name: layer for name, layer in quantized_layers(small).items() if tunable(layer)}
    (before,) = divergences(model, [small], check)
    first = {name: layer.scale.clone() for name, layer in layers.items()}
    logarithms = {name: torch.zeros_like(layer.scale, dtype=torch.float32, requires_grad=True)
                  for name, layer in layers.items()}  # fmt: skip
    optimizer = torch.optim.Adam(list(logarithms.values()), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    with evaluating(small), _trained(layers, first, logarithms):
        for step in range(steps):
            tokens = text[step % len(text)]
            with torch.no_grad():
                target = predicted(model, tokens)[0].float().log_softmax(-1)
            with torch.enable_grad():
                logits = predicted(small, tokens)[0].float().log_softmax(-1)
                loss = F.kl_div(logits, target, reduction="batchmean", log_target=True)
            gradients = torch.autograd.grad(loss, list(logarithms.values()), allow_unused=True)
            for logarithm, gradient in zip(logarithms.values(), gradients, strict=True):
                logarithm.grad = gradient
            optimizer.step()
            schedule.step()
            on_progress(step + 1)
    with torch.no_grad():
        for name, layer in layers.items():
            layer.scale = _stored(first[name], logarithms[name], layer).to(layer.scale.dtype)
    (after,) = divergences(model, [small], check)
    gain, error = mean_and_error([a - b for a, b in zip(before, after, strict=True)])
    kept = gain - reach(error, len(check)) > 0
    if not kept:
        for name, layer in layers.items():
            layer.scale = first[name]
    return Tuning(steps, mean_and_error(before), mean_and_error(after), kept)


def with_own_scale(layer: QuantizedLinear) -> QuantizedLinear:
    """Return a layer that shares all buffers and may be given another scale."""
    own = copy.copy(layer)
    own._buffers = dict(layer._buffers)
    return own


def tunable(layer: QuantizedLinear) -> bool:
    """Tell whether a layer's scales are numbers of whole ones, and nothing else is rounded."""
    return isinstance(layer.grid, Absmax) and not layer.scheme.activations


def _stored(first: Tensor, logarithm: Tensor, layer: QuantizedLinear) -> Float[Tensor, "N G"]:
    """Return the scales as the file stores them, with the gradient of the unrounded ones."""
    scale = first.float() * logarithm.exp()
    return scale + (scale.to(layer.grid.scale_type).float() - scale).detach()


@contextmanager
def _trained(
    layers: Mapping[str, QuantizedLinear],
    first: Mapping[str, Tensor],
    logarithms: Mapping[str, Tensor],
) -> Iterator[None]:
    """Let layers compute with scales that have a gradient."""

    def multiply(name: str, layer: QuantizedLinear, x: Tensor) -> Tensor:
        scale = _stored(first[name], logarithms[name], layer)
        codes = layer.operands.integers.float()
        group = layer.grid.group or layer.in_features
        weight = (codes.unflatten(1, (-1, group)) * scale.unsqueeze(2)).flatten(1)
        bias = None if layer.bias is None else layer.bias.float()
        return F.linear(x.float(), weight, bias).to(x.dtype)

    try:
        for name, layer in layers.items():
            layer.linear = lambda x, name=name, layer=layer: multiply(name, layer, x)
        yield
    finally:
        for layer in layers.values():
            del layer.linear
