"""Tuning of what a quantized file holds: scales, trained by KL with the codes fixed.

With codes q of layer W and scales s, Ŵ = q·s; s = s₀·exp(θ), θ trained by Adam on

    KL(p ‖ p̂) per predicted token, p of the model in full precision

(EfficientQAT's second stage, 2407.11062, end to end). Scales are rounded as the file stores them
in every step, with the gradient of the identity in θ: ∂L/∂θ = Σ (∂L/∂Ŵ)·Ŵ over the weights that
share the scale. Teacher and student are both in memory.

Shapes: M tokens, K input channels, N output channels, G scales of a row.
"""

import copy
import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from wakeful.errors import WakefulError
from wakeful.estimates import Estimate, interval_half_width, mean_and_error
from wakeful.model.evaluating import evaluating
from wakeful.quantization.convert import quantized_layers
from wakeful.quantization.linear import QuantizedLinear
from wakeful.quantization.measure import divergences, predicted
from wakeful.quantization.schemes import Absmax, Scheme
from wakeful.quantization.schemes.grids import Ggml
from wakeful.runs.run import replace_atomically, save_tensors
from wakeful.terminal.display import OnProgress, ignore_progress

RATE = 1e-3
"""Adam's rate for logarithms of scales."""
_TOKENS = 1024
"""Tokens of a step, about."""
_SECONDS_BETWEEN_STATES = 60.0
_MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's, of each parameter."""


@dataclass(frozen=True)
class Tuning:
    """Effect of tuning on text that trained nothing."""

    steps: int
    before: Estimate
    """KL from the model in full precision, nats per token."""
    after: Estimate
    improved: bool
    """True where the tuned scales stay: KL falls by more than its 95% interval, paired."""


def sequences_per_step(length: int) -> int:
    """Return the number of sequences of `length` tokens that a step reads."""
    return max(1, _TOKENS // length)


def tune_scales(
    model: nn.Module,
    small: nn.Module,
    text: Sequence[Int[Tensor, "1 L"]],
    check: Sequence[Int[Tensor, "1 L"]],
    *,
    steps: int,
    rate: float = RATE,
    state: Path | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Tuning:
    """Train the scales of `small`, made of `model`, in place, on `text` in turn.

    The untuned scales stay unless KL on `check` falls by more than its paired interval. `state` is
    a file to which the state of training is written every minute, and from which it goes on.

    Raises:
        WakefulError: `state` is not of this training.
    """
    layers = {
        name: layer for name, layer in quantized_layers(small).items() if is_tunable(layer.scheme)
    }
    first = {name: layer.scale for name, layer in layers.items()}
    logarithms = {
        name: torch.zeros_like(scale, dtype=torch.float32, requires_grad=True)
        for name, scale in first.items()
    }
    optimizer = torch.optim.Adam(list(logarithms.values()), lr=rate)
    begin, identity = 0, ""
    if state is not None:
        identity = _identity(layers.values(), text, steps, rate)
        begin = _resume(state, optimizer, logarithms, identity) if state.exists() else 0
    (before,) = divergences(model, [small], check)
    size, saved = sequences_per_step(text[0].shape[1]), time.monotonic()
    on_progress(begin, steps)
    with evaluating(small), _trained(layers, first, logarithms):
        for step in range(begin, steps):
            places = range(step * size, (step + 1) * size)
            tokens = torch.cat([text[number % len(text)] for number in places])
            _learn(model, small, tokens, list(logarithms.values()))
            optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.step()
            late = time.monotonic() - saved > _SECONDS_BETWEEN_STATES
            if state is not None and (late or step + 1 == steps):
                _save_state(state, optimizer, logarithms, identity, step + 1)
                saved = time.monotonic()
            on_progress(step + 1, steps)
    for name, layer in layers.items():
        layer.scale = _tuned(layer, first[name], logarithms[name].detach())
    (after,) = divergences(model, [small], check)
    gain, error = mean_and_error([a - b for a, b in zip(before, after, strict=True)])
    improved = gain - interval_half_width(error, len(check)) > 0
    if not improved:
        for name, layer in layers.items():
            layer.scale = first[name]
    return Tuning(steps, mean_and_error(before), mean_and_error(after), improved)


def _learn(
    model: nn.Module, small: nn.Module, tokens: Int[Tensor, "B L"], parameters: Sequence[Tensor]
) -> None:
    """Set the parameters' gradients of KL(model ‖ small) per predicted token."""
    with torch.no_grad():
        target = predicted(model, tokens)[0].float().log_softmax(-1)
    with torch.enable_grad():
        logits = predicted(small, tokens)[0].float().log_softmax(-1)
        loss = F.kl_div(logits, target, reduction="batchmean", log_target=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def with_own_scale(layer: QuantizedLinear) -> QuantizedLinear:
    """Return a layer that shares all buffers and may be given another scale."""
    own = copy.copy(layer)
    own._buffers = dict(layer._buffers)
    return own


def is_tunable(scheme: Scheme) -> bool:
    """Tell whether a scheme's scales are numbers of whole ones, and nothing else is rounded."""
    return isinstance(scheme.weights, Absmax | Ggml) and not scheme.activations


def _tuned(
    layer: QuantizedLinear, first: Float[Tensor, "N G"], logarithm: Float[Tensor, "N G"]
) -> Float[Tensor, "N G"]:
    """Return s₀·exp(θ) as the file stores it."""
    return (first.float() * logarithm.exp()).to(layer.grid.scale_type)


class _Scaled(torch.autograd.Function):
    """x Ŵᵀ, with the gradients of x and of θ; Ŵ is dequantized again for them."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "M K"], logarithm: Tensor, layer: QuantizedLinear, first: Tensor
    ) -> Float[Tensor, "M N"]:
        operands = layer.operands
        scale = _tuned(layer, first, logarithm).float()
        ctx.operands = replace(operands, scales=replace(operands.scales, scale=scale))
        ctx.save_for_backward(x)
        return x @ ctx.operands.dequantized().T

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Float[Tensor, "M N"]
    ) -> tuple[Tensor | None, ...]:
        (x,), operands = ctx.saved_tensors, ctx.operands
        weight, scale = operands.dequantized(), operands.scales.scale
        of_weight = (gradient.T @ x).mul_(weight)
        of_groups = of_weight.unflatten(1, (scale.shape[1], -1)).sum(-1)
        return gradient @ weight, of_groups.sum_to_size(scale.shape), None, None


@contextmanager
def _trained(
    layers: Mapping[str, QuantizedLinear],
    first: Mapping[str, Tensor],
    logarithms: Mapping[str, Tensor],
) -> Iterator[None]:
    """Let layers compute with scales that have a gradient."""

    def multiply(name: str, layer: QuantizedLinear, x: Tensor) -> Tensor:
        rows = x.float().reshape(-1, layer.in_features)
        y = _Scaled.apply(rows, logarithms[name], layer, first[name])
        y = y if layer.bias is None else y + layer.bias.float()
        return y.to(x.dtype).view(*x.shape[:-1], layer.out_features)

    try:
        for name, layer in layers.items():
            layer.linear = lambda x, name=name, layer=layer: multiply(name, layer, x)
        yield
    finally:
        for layer in layers.values():
            del layer.linear


def _identity(
    layers: Iterable[QuantizedLinear], text: Sequence[Tensor], steps: int, rate: float
) -> str:
    """Return a digest of what a training begins with."""
    digest = hashlib.sha256(f"{steps} {rate}".encode())
    for tensor in (*(part for layer in layers for part in (layer.integers, layer.scale)), *text):
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _save_state(
    file: Path, optimizer: torch.optim.Optimizer, logarithms: Mapping[str, Tensor],
    identity: str, step: int,
) -> None:  # fmt: skip
    tensors = {f"{name}.logarithm": tensor.detach() for name, tensor in logarithms.items()}
    for name, tensor in logarithms.items():
        moments = optimizer.state[tensor]
        tensors |= {f"{name}.{kind}": moments[kind] for kind in _MOMENTS if kind in moments}
    with replace_atomically(file) as part:
        save_tensors(tensors, part, {"identity": identity, "step": str(step)})


def _resume(
    file: Path, optimizer: torch.optim.Optimizer, logarithms: Mapping[str, Tensor], identity: str
) -> int:
    """Take over the state of a training; return the steps done."""
    try:
        with safe_open(file, framework="pt") as tensors:
            metadata, names = tensors.metadata() or {}, set(tensors.keys())
            if metadata.get("identity") != identity:
                raise WakefulError(
                    f"{file} is the state of tuning another model, other text or other steps: name "
                    "another file"
                )
            step = int(metadata["step"])
            for name, logarithm in logarithms.items():
                logarithm.data.copy_(tensors.get_tensor(f"{name}.logarithm"))
                optimizer.state[logarithm] = {"step": torch.tensor(float(step))} | {
                    kind: tensors.get_tensor(f"{name}.{kind}").to(logarithm.device)
                    for kind in _MOMENTS if f"{name}.{kind}" in names
                }  # fmt: skip
    except (SafetensorError, OSError) as error:
        raise WakefulError(f"{file} is no state of tuning ({error}): name another file") from None
    return step
