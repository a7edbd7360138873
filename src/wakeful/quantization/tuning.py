"""Training of a quantized model's scales by KL, with the codes fixed.

With codes q of layer W and scales s, Ŵ = q·s; s = s₀·exp(θ), θ trained by Adam on

    KL(p ‖ p̂) per predicted token, p of the model in full precision

(EfficientQAT's second stage, 2407.11062, end to end). Scales are rounded as the file stores them
in every step. The backward pass ignores that rounding: ∂L/∂θ = Σ (∂L/∂Ŵ)·Ŵ over the weights that
share the scale. Inputs and outputs that the scheme quantizes are rounded too, again with the
gradient of the identity. A format with two levels of scales has a θ for each level. The model in
full precision and the quantized one are loaded at once.

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
from wakeful.paged import to_plain_tensor
from wakeful.quantization.convert import quantized_layers
from wakeful.quantization.linear import QuantizedLinear
from wakeful.quantization.measure import kl_per_sequence, logits_and_targets
from wakeful.quantization.norm_readers import readers_of_tensors
from wakeful.quantization.schemes import Scheme
from wakeful.runs.run import replace_atomically, save_tensors
from wakeful.terminal.display import OnProgress, ignore_progress

RATE = 1e-3
"""Learning rate of Adam, for θ."""
_TOKENS = 1024
"""Approximate number of tokens of a step."""
_VALIDATION_EVERY = 9
"""Of so many sequences, one decides whether training helped."""
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


def count_sequences(steps: int, length: int) -> int:
    """Return the number of sequences of `length` tokens that training reads in `steps` steps,
    together with those that `split_sequences` takes away to decide whether it helped.
    """
    num_training = steps * sequences_per_step(length)
    return num_training + num_training // (_VALIDATION_EVERY - 1)


def split_sequences(text: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split sequences into (those to train scales on, those that decide whether training helped).

    Every ninth sequence decides. A few sequences would not tell a small improvement from chance.
    """
    validation = [*text[_VALIDATION_EVERY - 1 :: _VALIDATION_EVERY]]
    training = [tokens for index, tokens in enumerate(text, 1) if index % _VALIDATION_EVERY]
    return training, validation


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
        quantized_model: its quantized version, of which the layers with scales that can be trained
            (`is_tunable`) are trained.
        text: sequences of one length to train on, read in order, again from the first one when
            they are used up.
        validation_text: other sequences, to measure KL on.
        steps: number of steps of Adam.
        rate: learning rate of the first step; it falls to 0 as a cosine.
        state: file to which the state of training is written every minute and at the end. If it
            exists, training continues from it.
        on_progress: called with the number of steps done and their total.

    Raises:
        WakefulError: `state` is a file that does not belong to this training.
    """
    layers = {
        name: layer
        for name, layer in quantized_layers(quantized_model).items()
        if is_tunable(layer.scheme)
    }
    (kl_before,) = kl_per_sequence(model, [quantized_model], validation_text)
    if not layers:
        return Tuning(0, mean_and_error(kl_before), mean_and_error(kl_before), improved=False)
    shares_scales = any(layer.grid.shares_outer_scale for layer in layers.values())
    readers = readers_of_tensors(model) if shares_scales else []
    log_ratios = _start_log_ratios(layers, readers)
    # A θ that several layers share is stored once.
    name_of_ratio = {theta: name for name, theta in log_ratios.items()}
    distinct_ratios = {name: theta for theta, name in name_of_ratio.items()}
    parameters = list(distinct_ratios.values())
    optimizer = torch.optim.Adam(parameters, lr=rate)
    first_step, digest = 0, ""
    if state is not None:
        digest = _training_digest(layers.values(), text, steps, rate)
        if state.exists():
            first_step = _load_state(state, optimizer, distinct_ratios, digest)
    num_sequences, saved_at = sequences_per_step(text[0].shape[1]), time.monotonic()
    on_progress(first_step, steps)
    with evaluating(model, quantized_model), _trainable_scales(layers, log_ratios):
        for step in range(first_step, steps):
            indices = range(step * num_sequences, (step + 1) * num_sequences)
            sequences = [text[index % len(text)] for index in indices]
            _set_kl_gradients(model, quantized_model, sequences, parameters)
            optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.step()
            is_due = time.monotonic() - saved_at > _SECONDS_BETWEEN_STATES
            if state is not None and (is_due or step + 1 == steps):
                _save_state(state, optimizer, distinct_ratios, digest, step + 1)
                saved_at = time.monotonic()
            on_progress(step + 1, steps)
    untrained = {name: (layer.scale, layer.outer) for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.scale, layer.outer = _tuned_scales(layer, *_of_layer(name, log_ratios))
    (kl_after,) = kl_per_sequence(model, [quantized_model], validation_text)
    improved = is_clear_decrease(kl_before, kl_after)
    if not improved:
        for name, layer in layers.items():
            layer.scale, layer.outer = untrained[name]
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
    """Set `grad` of each parameter to the gradient of the mean KL(model ‖ quantized_model) per
    predicted token; it is None for a parameter that the sequences do not reach.

    The sequences, which have one length, are run one by one, to save memory. For a predicted token,
    with probabilities p by the model and p̂ by the quantized one, ∂KL/∂logits = p̂ − p. The sum over
    tokens is propagated, and divided at the end: the mean's gradient might underflow in float16.
    """
    for parameter in parameters:
        parameter.grad = None
    num_predicted = 0
    for tokens in sequences:
        with torch.no_grad():
            true_probs = logits_and_targets(model, tokens)[0].float().softmax(-1)
        with torch.enable_grad():
            logits = logits_and_targets(quantized_model, tokens)[0]
        logit_gradient = logits.detach().float().softmax(-1).sub_(true_probs)
        num_predicted += len(logits)
        # Adds to `grad` of the parameters alone, of no weight of the model.
        logits.backward(logit_gradient.to(logits.dtype), inputs=list(parameters))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad /= num_predicted


def copy_with_own_scales(layer: QuantizedLinear) -> QuantizedLinear:
    """Return a copy of a layer that shares its tensors. New scales that are assigned to the copy
    leave `layer` unchanged.
    """
    copied = copy.copy(layer)
    copied._buffers = dict(layer._buffers)  # else both have the same dictionary of buffers
    return copied


def is_tunable(scheme: Scheme) -> bool:
    """Tell whether the scales of a scheme's weights can be trained; powers of two cannot, because
    they are too coarse for the small steps of training.
    """
    return scheme.weights is not None and scheme.weights.scale_type != torch.float8_e8m0fnu


def _start_log_ratios(
    layers: Mapping[str, QuantizedLinear], readers: Iterable[Sequence[str]] = ()
) -> dict[str, Float[Tensor, "_ _"]]:
    """Return θ = ln(s / s₀) = 0 of every scale to train, by the name of its buffer, such as
    "layer.scale".

    `readers` lists groups of layers that read one tensor. Engines multiply such a group as one
    matrix, so that its outer scales share one θ.
    """
    log_ratios: dict[str, Tensor] = {}
    for name, layer in layers.items():
        log_ratios[f"{name}.scale"] = torch.zeros_like(
            layer.scale, dtype=torch.float32, requires_grad=True
        )
        if layer.outer is not None:
            log_ratios[f"{name}.outer"] = torch.zeros_like(layer.outer, requires_grad=True)
    for names in readers:
        sharing = [f"{name}.outer" for name in names if f"{name}.outer" in log_ratios]
        for name in sharing:
            log_ratios[name] = log_ratios[sharing[0]]
    return log_ratios


def _of_layer(name: str, log_ratios: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the named layer's θ of its scales and of its outer scale, None if it has none."""
    return log_ratios[f"{name}.scale"], log_ratios.get(f"{name}.outer")


def _tuned_scales(
    layer: QuantizedLinear, log_ratio: Tensor, outer_log_ratio: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return a layer's trained scales s = s₀·exp(θ), (N, G) or (1, 1), as the layer stores them,
    and its trained outer scale, (N, 1) or (1, 1), or None if it has none.

    Scales above the largest number of the stored dtype become that number.
    """
    grid, outer = layer.grid, layer.outer
    largest = torch.finfo(grid.scale_type).max
    scale = grid.decode_scale(layer.scale) * log_ratio.detach().exp()
    if outer is not None and outer_log_ratio is not None:
        outer = outer * outer_log_ratio.detach().exp()
    return grid.encode_scale(scale.clamp(max=largest)), outer


class _TunedLinear(torch.autograd.Function):
    """x Ŵᵀ with gradients for x and for θ = ln(s / s₀), s₀ being the layer's initial scales.

    Ŵ is dequantized again in the backward pass, to save memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "M K"],
        layer: QuantizedLinear,
        log_ratio: Tensor,
        outer_log_ratio: Tensor | None,
    ) -> Float[Tensor, "M N"]:
        """Return x Ŵᵀ, with the codes of `layer` and its scales times exp(θ), rounded as they are
        stored.

        θ of the scales, `log_ratio`, is (N, G) or (1, 1), that of an outer scale (N, 1) or (1, 1).
        """
        grid, operands = layer.grid, layer.operands
        scale, outer = _tuned_scales(layer, log_ratio, outer_log_ratio)
        scales = replace(operands.scales, scale=grid.decode_scale(scale), outer=outer)
        ctx.operands = replace(operands, scales=scales)
        ctx.save_for_backward(x)
        return x @ ctx.operands.dequantize().T

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Float[Tensor, "M N"]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of each θ: ∂L/∂θ = Σ (∂L/∂Ŵ)·Ŵ over weights that share a
        scale.

        `layer` gets None. Rounding of the scales to their stored dtype is ignored.
        """
        (x,), operands = ctx.saved_tensors, ctx.operands
        weight, outer = operands.dequantize(), operands.scales.outer
        weight_products = (gradient.T @ x).mul_(weight)
        sums = operands.grid.sum_per_scale(weight_products)
        outer_sums = None if outer is None else sums.sum_to_size(outer.shape)
        return gradient @ weight, None, sums, outer_sums


class _StraightThrough(torch.autograd.Function):
    """Rounded values in place of x, with the gradient of the identity."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        """Return `rounded`, the values of x (M, K) in a number format."""
        return rounded.view_as(x)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        _ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        """Return the gradient of x, that of the result."""
        return gradient, None


@contextmanager
def _trainable_scales(
    layers: Mapping[str, QuantizedLinear], log_ratios: Mapping[str, Tensor]
) -> Iterator[None]:
    """Make layers compute with trainable scales s₀·exp(θ) within the context.

    `layers` have their initial scales s₀; `log_ratios` are θ by the name of the scale's buffer.
    """

    def multiply(name: str, layer: QuantizedLinear, x: Tensor) -> Tensor:
        """Return what `QuantizedLinear.linear` does, but differentiable by x and θ."""
        rows, scales, num_sequences = layer.prepare_inputs(x)
        grid = layer.scheme.inputs
        if grid is not None and scales is not None:
            rows = _StraightThrough.apply(rows, grid.fake_quantize(rows.detach(), scales))
        y = _TunedLinear.apply(rows, layer, *_of_layer(name, log_ratios))
        y = y if layer.bias is None else y + layer.bias.float()
        if layer.scheme.outputs is not None:
            y = _StraightThrough.apply(y, layer.round_outputs(y.detach(), num_sequences))
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

    Training continues only from a state that has the same digest.
    """
    digest = hashlib.sha256(f"{steps} {rate}".encode())
    of_layers = ((layer.integers, layer.scale, layer.outer) for layer in layers)
    tensors = [tensor for each in of_layers for tensor in each if tensor is not None]
    for tensor in [*tensors, *text]:
        plain = to_plain_tensor(tensor).cpu().contiguous()
        digest.update(f"{tuple(plain.shape)}".encode())
        digest.update(plain.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _save_state(
    file: Path, optimizer: torch.optim.Optimizer, log_ratios: Mapping[str, Tensor],
    digest: str, step: int,
) -> None:  # fmt: skip
    """Write the trained logarithms θ and Adam's state by the scale's name, with the training's
    `digest` and the number `step` of steps done.
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
        WakefulError: the file holds no such state, or its digest is not `digest`, this training's.
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
