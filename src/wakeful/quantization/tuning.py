"""Training of a quantized model's scales by KL, with the codes fixed.

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from wakeful.errors import WakefulError
from wakeful.estimates import Estimate, interval_half_width, mean_and_error
from wakeful.model.evaluating import evaluating
from wakeful.quantization.convert import quantized_layers
from wakeful.quantization.linear import QuantizedLinear
from wakeful.quantization.measure import kl_per_sequence, logits_and_targets
from wakeful.quantization.schemes import Absmax, Scheme
from wakeful.quantization.schemes.grids import Ggml
from wakeful.runs.run import replace_atomically, save_tensors
from wakeful.terminal.display import OnProgress, ignore_progress

RATE = 1e-3
"""Learning rate of Adam, for θ."""
_TOKENS = 1024
"""Approximate number of tokens of a step."""
_SECONDS_BETWEEN_STATES = 60.0
_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
"""Names of what Adam keeps for a parameter: the number of its steps, and its moments."""


@dataclass(frozen=True)
class Tuning:
    """Effect of training the scales, on text that was not used for training."""

    steps: int
    before: Estimate
    """KL from the model in full precision, nats per token."""
    after: Estimate
    improved: bool
    """True where the trained scales are used: KL falls by more than its paired 95% interval."""


def sequences_per_step(length: int) -> int:
    """Return the number of sequences of `length` tokens that one step of training reads."""
    return max(1, _TOKENS // length)


def tune_scales(
    model: nn.Module,
    quantized_model: nn.Module,
    text: Sequence[Int[Tensor, "1 L"]],
    validation_text: Sequence[Int[Tensor, "1 L"]],
    *,
    steps: int,
    rate: float = RATE,
    state: Path | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Tuning:
    """Train the scales of a quantized model, in place, by KL from the full-precision `model`.

    Return KL on the validation text before and after. Unless it falls by more than its paired 95%
    interval, the model gets its untrained scales back.

    Args:
        model: the model in full precision.
        quantized_model: its quantized version, of which some layers have scales to train.
        text: sequences of one length to train on, which steps read in turn.
        validation_text: other sequences, to measure KL on.
        steps: number of steps of Adam.
        rate: learning rate of the first step; it falls to 0 as a cosine.
        state: file to which the state of training is written every minute and at the end. If it
            exists, training continues from it.
        on_progress: called with the number of steps done and their total.

    Raises:
        WakefulError: `state` is a file of another training.
    """
    layers = {
        name: layer
        for name, layer in quantized_layers(quantized_model).items()
        if is_tunable(layer.scheme)
    }
    initial_scales = {name: layer.scale for name, layer in layers.items()}
    log_ratios = {  # θ of each layer
        name: torch.zeros_like(scale, dtype=torch.float32, requires_grad=True)
        for name, scale in initial_scales.items()
    }
    parameters = list(log_ratios.values())
    optimizer = torch.optim.Adam(parameters, lr=rate)
    first_step, digest = 0, ""
    if state is not None:
        digest = _training_digest(layers.values(), text, steps, rate)
        if state.exists():
            first_step = _load_state(state, optimizer, log_ratios, digest)
    (kl_before,) = kl_per_sequence(model, [quantized_model], validation_text)
    num_sequences, saved_at = sequences_per_step(text[0].shape[1]), time.monotonic()
    on_progress(first_step, steps)
    with evaluating(quantized_model), _trainable_scales(layers, initial_scales, log_ratios):
        for step in range(first_step, steps):
            indices = range(step * num_sequences, (step + 1) * num_sequences)
            sequences = [text[index % len(text)] for index in indices]
            _set_kl_gradients(model, quantized_model, sequences, parameters)
            optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.step()
            is_due = time.monotonic() - saved_at > _SECONDS_BETWEEN_STATES
            if state is not None and (is_due or step + 1 == steps):
                _save_state(state, optimizer, log_ratios, digest, step + 1)
                saved_at = time.monotonic()
            on_progress(step + 1, steps)
    for name, layer in layers.items():
        layer.scale = _tuned_scale(layer, initial_scales[name], log_ratios[name].detach())
    (kl_after,) = kl_per_sequence(model, [quantized_model], validation_text)
    improved = is_clear_decrease(kl_before, kl_after)
    if not improved:
        for name, layer in layers.items():
            layer.scale = initial_scales[name]
    return Tuning(steps, mean_and_error(kl_before), mean_and_error(kl_after), improved)


def is_clear_decrease(before: Sequence[float], after: Sequence[float]) -> bool:
    """Tell whether the mean falls from `before` to `after` by more than chance explains.

    The fall has to exceed the half-width of the 95% interval (Student's t) of the mean of the
    paired differences.
    """
    differences = [old - new for old, new in zip(before, after, strict=True)]
    decrease, error = mean_and_error(differences)
    return decrease > interval_half_width(error, len(differences))


def _set_kl_gradients(
    model: nn.Module,
    quantized_model: nn.Module,
    sequences: Sequence[Int[Tensor, "1 L"]],
    parameters: Sequence[Tensor],
) -> None:
    """Set each parameter's `grad`, the gradient of the mean KL(model ‖ quantized_model) per
    predicted token.

    The sequences, which have one length, are run one by one, to save memory. For a predicted token,
    with probabilities p by the model and p̂ by the quantized one, ∂KL/∂logits = p̂ − p.
    """
    for parameter in parameters:
        parameter.grad = None
    for tokens in sequences:
        with torch.no_grad():
            true_probs = logits_and_targets(model, tokens)[0].float().softmax(-1)
        with torch.enable_grad():
            logits = logits_and_targets(quantized_model, tokens)[0]
        logit_gradient = logits.detach().float().softmax(-1).sub_(true_probs)
        logit_gradient /= len(logits) * len(sequences)  # the number of predicted tokens
        # Adds to `grad` of the parameters alone, of no weight of the model.
        logits.backward(logit_gradient.to(logits.dtype), inputs=list(parameters))


def copy_with_own_scale(layer: QuantizedLinear) -> QuantizedLinear:
    """Return a copy of a layer that shares its buffers, but whose `scale` can be replaced without
    an effect on `layer`.
    """
    copied = copy.copy(layer)
    copied._buffers = dict(layer._buffers)  # else both have the same dictionary of buffers
    return copied


def is_tunable(scheme: Scheme) -> bool:
    """Tell whether the scales of a scheme can be trained: it quantizes weights only, to whole
    numbers without zero points.
    """
    return isinstance(scheme.weights, Absmax | Ggml) and not scheme.activations


def _tuned_scale(
    layer: QuantizedLinear, initial: Float[Tensor, "N G"], log_ratio: Float[Tensor, "N G"]
) -> Float[Tensor, "N G"]:
    """Return the trained scale s = s₀·exp(θ) in the dtype in which the layer stores scales."""
    return (initial.float() * log_ratio.exp()).to(layer.grid.scale_type)


class _TunedLinear(torch.autograd.Function):
    """x Ŵᵀ with gradients for x and for θ, the logarithm of the scales' ratio to initial ones.

    Ŵ is dequantized again in the backward pass, to save memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "M K"],
        log_ratio: Tensor,
        layer: QuantizedLinear,
        initial_scale: Tensor,
    ) -> Float[Tensor, "M N"]:
        """Return x Ŵᵀ, with Ŵ = codes of the layer · scales, `initial_scale`·exp(`log_ratio`).

        The scales, (N, G) or (1, 1), are rounded to the dtype in which the layer stores them.
        """
        operands = layer.operands
        scale = _tuned_scale(layer, initial_scale, log_ratio).float()
        ctx.operands = replace(operands, scales=replace(operands.scales, scale=scale))
        ctx.save_for_backward(x)
        return x @ ctx.operands.dequantize().T

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Float[Tensor, "M N"]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of θ: ∂L/∂θ = Σ (∂L/∂Ŵ)·Ŵ over weights that share a scale.

        The other two inputs have none. Rounding of the scale to its stored dtype is treated as the
        identity.
        """
        (x,), operands = ctx.saved_tensors, ctx.operands
        weight, scale = operands.dequantize(), operands.scales.scale
        weight_products = (gradient.T @ x).mul_(weight)
        # Sums over the columns of each group, then, if a scale is per tensor, over rows too.
        group_sums = weight_products.unflatten(1, (scale.shape[1], -1)).sum(-1)
        return gradient @ weight, group_sums.sum_to_size(scale.shape), None, None


@contextmanager
def _trainable_scales(
    layers: Mapping[str, QuantizedLinear],
    initial_scales: Mapping[str, Tensor],
    log_ratios: Mapping[str, Tensor],
) -> Iterator[None]:
    """Make layers compute with trainable scales s₀·exp(θ) within the context.

    By layer name, `initial_scales` are s₀ and `log_ratios` θ.
    """

    def multiply(name: str, layer: QuantizedLinear, x: Tensor) -> Tensor:
        """Return x Ŵᵀ + b as `QuantizedLinear.linear` does, but differentiable by θ."""
        rows = x.float().reshape(-1, layer.in_features)
        y = _TunedLinear.apply(rows, log_ratios[name], layer, initial_scales[name])
        y = y if layer.bias is None else y + layer.bias.float()
        return y.to(x.dtype).view(*x.shape[:-1], layer.out_features)

    try:
        for name, layer in layers.items():
            layer.linear = partial(multiply, name, layer)  # hides the method of the class
        yield
    finally:
        for layer in layers.values():
            del layer.linear  # the class's method is in use again


def _training_digest(
    layers: Iterable[QuantizedLinear], text: Sequence[Tensor], steps: int, rate: float
) -> str:
    """Return a digest of a training's layers (codes and untrained scales), text and settings.

    A saved state with the same digest is a state of the same training.
    """
    digest = hashlib.sha256(f"{steps} {rate}".encode())
    tensors: list[Tensor] = []
    for layer in layers:
        tensors += [layer.integers, layer.scale]
    for tensor in [*tensors, *text]:
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _save_state(
    file: Path, optimizer: torch.optim.Optimizer, log_ratios: Mapping[str, Tensor],
    digest: str, step: int,
) -> None:  # fmt: skip
    """Write the trained logarithms θ and Adam's state by layer name, with the training's `digest`
    and the number `step` of steps done.
    """
    tensors = {f"{name}.logarithm": tensor.detach() for name, tensor in log_ratios.items()}
    for name, tensor in log_ratios.items():
        # Empty for a layer without a gradient so far, such as an expert that no token has reached.
        if state := optimizer.state[tensor]:
            tensors |= {f"{name}.{key}": state[key] for key in _ADAM_STATE}
    with replace_atomically(file) as part:
        save_tensors(tensors, part, {"identity": digest, "step": str(step)})


def _load_state(
    file: Path, optimizer: torch.optim.Optimizer, log_ratios: Mapping[str, Tensor], digest: str
) -> int:
    """Load the state of a training from a file; return the number of steps done.

    The trained logarithms θ are copied into `log_ratios`, Adam's state goes into `optimizer`.

    Raises:
        WakefulError: the file holds no such state, or `digest`, which stands for this training, is
            not the file's.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            metadata, stored_names = tensors.metadata() or {}, set(tensors.keys())
            if metadata.get("identity") != digest:
                raise WakefulError(
                    f"{file} is the state of tuning another model, other text or other steps: name "
                    "another file"
                )
            step = int(metadata["step"])
            for name, log_ratio in log_ratios.items():
                log_ratio.data.copy_(tensors.get_tensor(f"{name}.logarithm"))
                keys = {key: f"{name}.{key}" for key in _ADAM_STATE}
                if stored_names.isdisjoint(keys.values()):  # the layer has had no gradient so far
                    continue
                state = {key: tensors.get_tensor(stored) for key, stored in keys.items()}
                for moment in ("exp_avg", "exp_avg_sq"):  # Adam keeps its step on the CPU
                    state[moment] = state[moment].to(log_ratio.device)
                optimizer.state[log_ratio] = state
    except (SafetensorError, OSError) as error:
        raise WakefulError(f"{file} is no state of tuning ({error}): name another file") from None
    return step
