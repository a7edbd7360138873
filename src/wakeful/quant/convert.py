"""`quantize`: a model's linear layers in whole numbers, the model itself unchanged."""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from wakeful.errors import WakefulError
from wakeful.model.attention import Heads
from wakeful.probes.running import logits_of
from wakeful.quant.arithmetic import LINEARS, Arithmetic, torchao_kernels
from wakeful.quant.linear import QuantizedLinear, matrix, quantized
from wakeful.quant.schemes import Scheme, parse_scheme
from wakeful.roles import role_of


def quantize(
    model: nn.Module,
    scheme: Scheme | str,
    *,
    arithmetic: Arithmetic = "reference",
    calibration: Sequence[Tensor] = (),
    skip: Sequence[str] = (),
) -> nn.Module:
    """Return a model whose linear layers are quantized; it shares the rest with `model`.

    All linear layers but those tied to an embedding and those whose role is to stay; embeddings,
    norms and the mixing weights of routes and depth stay as they are. `quantized_layers` says which
    layers it became.

    Args:
        model: a `Decoder` or a Transformers model, in evaluation mode.
        scheme: a `Scheme`, its name ("fine", "w4g128", "nvfp4" ...) or its expression.
        arithmetic: how the layers compute: "reference" (dequantized), "integer" or "torchao"; an
            emulated scheme computes one way.
        calibration: token ids (B, L) to set static activation scales from.
        skip: patterns ("lm_head", "*.down_proj") of layers to leave in full precision.

    Raises:
        WakefulError: a layer cannot be quantized (it is named), calibration is missing or
            superfluous, or a pattern matches nothing. The model is unchanged.
    """
    scheme = parse_scheme(scheme)
    if arithmetic not in LINEARS:
        raise WakefulError(f"arithmetic must be one of {', '.join(LINEARS)}, got {arithmetic!r}")
    if arithmetic == "torchao":
        torchao_kernels()
        if scheme.emulated or scheme.weights.group:
            raise WakefulError(
                f"torchao has no kernel here for {scheme}, which has groups or floats: use the "
                "arithmetic reference or integer"
            )
        if scheme.inputs is not None and not scheme.weights.symmetric:
            raise WakefulError(
                f"torchao multiplies int8 inputs by weights without a zero point, and {scheme} has "
                f"{scheme.weights}: use the arithmetic reference or integer"
            )
    if (scheme.scales == "static") != bool(calibration):
        raise WakefulError(
            "static scales need calibration text"
            if scheme.scales == "static"
            else f"{scheme} has dynamic scales: calibration text would be ignored"
        )
    layers = linear_layers(model, skip)
    replaced: dict[int, QuantizedLinear] = {}
    for name, layer in layers.items():
        try:
            replaced[id(layer)] = quantized(layer, scheme, arithmetic)
        except WakefulError as error:
            raise WakefulError(
                f"{name} cannot be quantized: {error}; leave it as it is with --skip {name}"
            ) from None
    if scheme.scales == "static":
        found = largest_activations(model, layers, calibration)
        for name, layer in layers.items():
            replaced[id(layer)].calibrate(*found[name])
    return exchange(model, replaced)


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return a quantized model's quantized layers by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def linear_layers(model: nn.Module, skip: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Return the layers that `quantize` quantizes, by name, in the model's order.

    Raises:
        WakefulError: the model has a layer with a matrix that is neither a linear layer nor known
            to stay, is quantized already, or has no linear layer; or a pattern matches nothing.
    """
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    layers: dict[str, nn.Module] = {}
    used: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            raise WakefulError(f"the model is quantized already: {name} is {module.scheme}")
        patterns = [pattern for pattern in skip if name and fnmatchcase(name, pattern)]
        used.update(patterns)
        if patterns or isinstance(module, nn.Embedding):
            continue
        if is_linear(module):
            if id(module.weight) not in embedded and not _stays(module.weight):
                layers[name] = module
        else:
            _refuse_matrices(name, module)
    unused = [pattern for pattern in skip if pattern not in used]
    if unused:
        raise WakefulError(f"--skip {unused[0]} matches no layer")
    if not layers:
        raise WakefulError(f"{type(model).__name__} has no linear layer to quantize")
    return layers


@torch.inference_mode()
def largest_activations(
    model: nn.Module, layers: dict[str, nn.Module], calibration: Sequence[Tensor]
) -> dict[str, tuple[float, float]]:
    """Return the largest |x| of each layer's input and output over calibration tokens."""
    found = dict.fromkeys(layers, (0.0, 0.0))

    def see(name: str):
        def hook(layer: nn.Module, args: tuple, _output: object) -> None:
            x = args[0]
            y = plain_linear(layer, x)
            now = float(x.abs().max()), float(y.abs().max())
            found[name] = max(found[name][0], now[0]), max(found[name][1], now[1])

        return hook

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_hook(see(name)).remove)
        for tokens in calibration:
            logits_of(model, tokens)
    return found


def plain_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Return x Wᵀ + b, the product alone where the layer does more with it."""
    weight, bias = matrix(layer)
    return torch.nn.functional.linear(x, weight, bias)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose product is all it does, or our heads."""
    if isinstance(module, Heads | Conv1D):
        return True
    if not isinstance(module, nn.Linear):
        return False
    return type(module).forward is nn.Linear.forward or _only_multiplies(module)


@torch.no_grad()
def _only_multiplies(layer: nn.Linear) -> bool:
    """Whether a linear layer with a forward of its own (Falcon's, for one) adds nothing to it."""
    weight = layer.weight
    x = torch.linspace(-1, 1, 2 * weight.shape[1], dtype=weight.dtype, device=weight.device)
    x = x.view(2, -1)
    try:
        y = type(layer).forward(layer, x)
    except (TypeError, RuntimeError):  # it wants more than one tensor
        return False
    expected = plain_linear(layer, x)
    close = 1e-2 if weight.dtype in (torch.bfloat16, torch.float16) else 1e-5
    if not isinstance(y, Tensor) or y.shape != expected.shape:
        return False
    return torch.allclose(y, expected, rtol=close, atol=close * float(expected.abs().max()))


def _stays(parameter: object) -> bool:
    """Whether a parameter's role is to stay as it is."""
    role = role_of(parameter) if isinstance(parameter, Tensor) else None
    return role is not None and not role.quantized


def _refuse_matrices(name: str, module: nn.Module) -> None:
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim < 2 or _stays(parameter):
            continue
        groups = f" of {module.groups} groups" if isinstance(module, nn.Conv1d) else ""
        cure = f"; leave it as it is with --skip {name}" if name else ""
        raise WakefulError(
            f"{name or 'the model'} is a {type(module).__name__}{groups}, whose {parameter_name} "
            f"{tuple(parameter.shape)} cannot be quantized{cure}"
        )


def exchange(model: nn.Module, replaced: dict[int, QuantizedLinear]) -> nn.Module:
    """Return a copy with layers exchanged by identity; parameters and buffers are shared."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in model.parameters()}
    shared |= {id(tensor): tensor for tensor in model.buffers()}
    # The copy must not see the exchanged layers' matrices, so it is told what they become.
    shared |= dict(replaced)
    return copy.deepcopy(model, shared).eval()
