"""Quantization of a model's linear layers; the model itself stays unchanged."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from wakeful.errors import WakefulError
from wakeful.model.attention import Heads
from wakeful.model.decoder import Decoder
from wakeful.model.fold import folded
from wakeful.paged import is_finite
from wakeful.probes.experts import routers_of, unfuse_experts, with_modules
from wakeful.probes.running import refuse_adapters
from wakeful.quantization.cache import (
    QuantizedCache,
    calibrate_cache,
    check_cache_support,
    quantize_cache,
)
from wakeful.quantization.calibration import linear_product
from wakeful.quantization.formats import quantize_layers, rotation_fits
from wakeful.quantization.linear import QuantizedLinear, weight_and_bias
from wakeful.quantization.schemes import Scheme, parse_scheme
from wakeful.switches import default_torch_state
from wakeful.terminal.display import OnProgress, ignore_progress
from wakeful.variants.roles import role_of


@default_torch_state()
def quantize_module(
    model: nn.Module,
    scheme: Scheme | str,
    *,
    calibration: Sequence[Tensor] = (),
    skip: Sequence[str] = (),
    on_progress: OnProgress = ignore_progress,
) -> nn.Module:
    """Return a copy of a model with quantized linear layers; all other weights are shared.

    Every linear layer is quantized except routers, layers tied to an embedding and those that a
    variant declares to stay in full precision. Fused experts become linear layers of their own. A
    scheme of the key/value cache alone quantizes no layer. A decoder is folded first.
    `quantized_layers` lists the quantized layers of the result.

    Args:
        model: a `Decoder` or a Transformers model.
        scheme: a `Scheme`, its name ("fine", "w4g128", "nvfp4" ...) or its expression.
        calibration: token ids (B, L) for static activation scales and for methods.
        skip: patterns ("lm_head", "*.down_proj") of layers to leave in full precision; none where
            the scheme quantizes the cache alone.
        on_progress: called with the number of layers quantized so far and their total.

    Raises:
        WakefulError: a layer cannot be quantized (it is named), calibration is missing or
            superfluous, a pattern matches nothing, or the cache cannot be quantized. The model is
            unchanged.
    """
    scheme = parse_scheme(scheme)
    _check_calibration(scheme, calibration)
    refuse_adapters(model)
    if scheme.cache is not None:
        check_cache_support(model)
    cache_alone = scheme.weights is None
    if cache_alone:
        if skip:
            raise WakefulError(f"{scheme} quantizes no layer, so there is nothing to skip")
        _refuse_quantized(model)
    model = prepare_model(model, ["*"] if cache_alone else skip)  # "*": experts stay fused
    layers = {} if cache_alone else linear_layers(model, skip)
    check_rotation(scheme, layers)
    _check_finite_weights(layers)
    # One scheme, here called "", is rounded to; the function can take several.
    by_scheme = quantize_layers(model, layers, {"": scheme}, calibration, on_progress=on_progress)
    replacements = {id(layers[name]): layer for name, layer in by_scheme[""].items()}
    quantized_model = quantize_cache(with_modules(model, replacements), scheme)
    if scheme.calibrates_cache:
        calibrate_cache(quantized_model, calibration)
    return quantized_model


def _check_calibration(scheme: Scheme, calibration: Sequence[Tensor]) -> None:
    """Raise `WakefulError` if calibration text is missing, or given although it is not read."""
    if calibration and not scheme.calibrated:
        raise WakefulError(
            f"{scheme} has dynamic scales: calibration text would be ignored; leave it out"
        )
    if scheme.calibrated and not calibration:
        reason = f"{scheme.method} needs" if scheme.method else "static scales need"
        raise WakefulError(f"{reason} calibration text")


def prepare_model(model: nn.Module, skip: Sequence[str] = ()) -> nn.Module:
    """Return a model that computes the same, in which the matrices to quantize are linear layers.

    A `Decoder` is folded: the scales of norms are multiplied into weights. In a Transformers model
    fused experts become linear layers, unless a pattern in `skip` matches their name. All other
    weights are shared with `model`.
    """
    if isinstance(model, Decoder):
        return folded(model)
    return unfuse_experts(
        model, lambda name: not any(fnmatchcase(name, pattern) for pattern in skip)
    )


def check_rotation(scheme: Scheme, layers: Mapping[str, nn.Module]) -> None:
    """Raise `WakefulError` that names all layers of which a scheme's rotation does not divide the
    number of input channels.
    """
    refused = [name for name, layer in layers.items() if not rotation_fits(layer, scheme)]
    if refused:
        width = weight_and_bias(layers[refused[0]])[0].shape[1]
        raise WakefulError(
            f"{refused[0]} reads {width} channels, which rotations of {scheme.rotation} do not "
            f"divide: use a smaller power of two, or {skip_option(refused)}"
        )


def skip_option(layers: Iterable[str]) -> str:
    """Return the option that leaves layers of these names out, such as
    "--skip 'model.layers.*.mlp.up_proj'": with one pattern for layers that differ by their numbers.
    """
    patterns = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in layers)
    return " ".join(["--skip", *(f"'{pattern}'" for pattern in patterns)])


def _check_finite_weights(layers: Mapping[str, nn.Module]) -> None:
    """Raise `WakefulError` that names all layers whose weights have a NaN or an infinity."""
    refused = [name for name, layer in layers.items() if not is_finite(weight_and_bias(layer)[0])]
    if refused:
        raise WakefulError(
            f"weights with a NaN or an infinity cannot be quantized: --skip {' '.join(refused)}"
        )


def scheme_of(model: nn.Module) -> Scheme | None:
    """Return the scheme of a model's quantized cache or, without one, of most of its quantized
    layers; None if nothing is quantized.
    """
    for module in model.modules():
        if isinstance(module, QuantizedCache):
            return module.scheme  # all caches of a model have the same
    schemes = Counter(layer.scheme for layer in quantized_layers(model).values())
    return schemes.most_common(1)[0][0] if schemes else None


def quantized_layers(
    model: nn.Module, *, remove_duplicate: bool = True
) -> dict[str, QuantizedLinear]:
    """Return a model's quantized layers by name.

    A layer that is used in several places is listed by its first name only, unless
    `remove_duplicate` is false.
    """
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=remove_duplicate)
        if isinstance(module, QuantizedLinear)
    }


def linear_layers(model: nn.Module, skip: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Return a model's linear layers to quantize, by name, except those that `skip` matches.

    Layers that share an embedding's weight, routers and layers declared to stay are left out.

    Raises:
        WakefulError: the model is quantized already, has no linear layer, or has a layer with a
            matrix that cannot be quantized; or a pattern matches nothing.
    """
    _refuse_quantized(model)
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    routers = routers_of(model)
    layers: dict[str, nn.Module] = {}
    # Patterns that match a module with a matrix, and those that match a container of modules.
    matched_layers, matched_containers = set[str](), set[str]()
    for name, module in model.named_modules():
        patterns = [pattern for pattern in skip if name and fnmatchcase(name, pattern)]
        has_matrix = any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
        if has_matrix:
            matched_layers.update(patterns)
        else:
            matched_containers.update(patterns)
        if patterns or isinstance(module, nn.Embedding) or id(module) in routers:
            continue
        if is_linear(module):
            is_tied = id(module.weight) in embeddings
            if not is_tied and not _stays_unquantized(module.weight):
                layers[name] = module
        else:
            _refuse_unknown_matrices(name, module)
    # A pattern that matches containers alone, such as "*.mlp", skips nothing.
    unused = next((pattern for pattern in skip if pattern not in matched_layers), None)
    if unused is not None:
        advice = ""
        if unused in matched_containers:
            advice = f"; for the layers inside it write '{unused}.*'"
        raise WakefulError(f"--skip {unused} matches no layer{advice}")
    if not layers:
        raise WakefulError(f"{type(model).__name__} has no linear layer to quantize")
    return layers


def _refuse_quantized(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedCache):
            raise WakefulError(f"the model is quantized already: {name} is {module.scheme}")


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module computes x Wᵀ + b and nothing else, or is one of our projections into
    heads.
    """
    if type(module) is Heads or isinstance(module, Conv1D):
        return True
    if not isinstance(module, nn.Linear):
        return False
    return type(module).forward is nn.Linear.forward or _only_multiplies(module)


@torch.no_grad()
def _only_multiplies(layer: nn.Linear) -> bool:
    """Tell whether a subclass of `nn.Linear` with its own forward, such as Falcon's, computes
    x Wᵀ + b up to its dtype's precision, by running it on one input.
    """
    weight = layer.weight
    x = torch.linspace(-1, 1, 2 * weight.shape[1], dtype=weight.dtype, device=weight.device)
    x = x.view(2, -1)
    try:
        y = type(layer).forward(layer, x)
    except (TypeError, RuntimeError):  # it takes more than one tensor
        return False
    expected = linear_product(layer, x)
    if not isinstance(y, Tensor) or y.shape != expected.shape:
        return False
    is_narrow = weight.dtype in (torch.bfloat16, torch.float16)
    tolerance = 1e-2 if is_narrow else 1e-5
    largest = float(expected.abs().max())
    return torch.allclose(y, expected, rtol=tolerance, atol=tolerance * largest)


def _stays_unquantized(parameter: object) -> bool:
    """Tell whether a parameter's declared role says that it is never quantized."""
    role = role_of(parameter) if isinstance(parameter, Tensor) else None
    return role is not None and not role.quantized


def _refuse_unknown_matrices(name: str, module: nn.Module) -> None:
    """Raise `WakefulError` if a module that is not a linear layer has a matrix of its own, unless
    the matrix is declared to stay unquantized.
    """
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim < 2 or _stays_unquantized(parameter):
            continue
        groups = f" of {module.groups} groups" if isinstance(module, nn.Conv1d) else ""
        advice = f"; leave it as it is with --skip {name}" if name else ""
        raise WakefulError(
            f"{name or 'the model'} is a {type(module).__name__}{groups}, whose {parameter_name} "
            f"{tuple(parameter.shape)} cannot be quantized{advice}"
        )
