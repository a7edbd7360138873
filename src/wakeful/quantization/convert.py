"""`quantize`: a model's linear layers in whole numbers, the model itself unchanged."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
from wakeful.quantization.arithmetic import LINEARS, Arithmetic
from wakeful.quantization.cache import QuantizedCache, calibrate_cache, check_cache, with_cache
from wakeful.quantization.formats import quantize_layers
from wakeful.quantization.linear import QuantizedLinear, by_sequence, matrix
from wakeful.quantization.observing import plain_linear
from wakeful.quantization.schemes import Scheme, parse_scheme
from wakeful.switches import default_torch_state
from wakeful.terminal.display import OnProgress, ignore_progress
from wakeful.variants.roles import role_of


@default_torch_state()
def quantize_module(
    model: nn.Module,
    scheme: Scheme | str,
    *,
    arithmetic: Arithmetic = "reference",
    calibration: Sequence[Tensor] = (),
    skip: Sequence[str] = (),
    others: Mapping[str, Scheme | str] | None = None,
    passed: OnProgress = ignore_progress,
) -> nn.Module:
    """Return a model whose linear layers are quantized; it shares the rest with `model`.

    All linear layers but those tied to an embedding, those whose role is to stay and routers;
    embeddings, norms and the mixing weights of routes and depth stay as they are. Experts in one
    tensor a projection become linear layers of their own. A scheme of the cache alone touches no
    layer. `quantized_layers` says which layers it became. A decoder is folded before.

    Args:
        model: a `Decoder` or a Transformers model.
        scheme: a `Scheme`, its name ("fine", "w4g128", "nvfp4" ...) or its expression.
        arithmetic: how the layers compute: "reference" (dequantized) or "integer"; an emulated
            scheme computes one way.
        calibration: token ids (B, L) that static activation scales and methods look at.
        skip: patterns ("lm_head", "*.down_proj") of layers to leave in full precision; none where
            the scheme quantizes the cache alone.
        others: schemes of weights and inputs for layers that match a pattern, the first of several,
            in place of `scheme`'s.
        passed: called with the layers quantized so far and their number.

    Raises:
        WakefulError: a layer cannot be quantized (it is named), calibration is missing or
            superfluous, a pattern matches nothing, or keys and values are out of reach. The model
            is unchanged.
    """
    scheme = parse_scheme(scheme)
    by_pattern = {
        pattern: parse_scheme(part_scheme) for pattern, part_scheme in (others or {}).items()
    }
    schemes = [scheme, *by_pattern.values()]
    if arithmetic not in LINEARS:
        raise WakefulError(f"arithmetic must be one of {', '.join(LINEARS)}, got {arithmetic!r}")
    wanting = next((part_scheme for part_scheme in schemes if part_scheme.calibrated), None)
    if (wanting is not None) != bool(calibration):
        problem = f"{scheme} has dynamic scales: calibration text would be ignored"
        if wanting is not None:
            problem = f"{wanting.method} needs" if wanting.method else "static scales need"
            problem += " calibration text"
        raise WakefulError(problem)
    refuse_adapters(model)
    if scheme.cache is not None:
        check_cache(model)
    if scheme.weights is None:
        if skip or by_pattern:
            raise WakefulError(f"{scheme} quantizes no layer, so there is nothing to skip")
        _refuse_quantized(model)
    model = prepare_model(model, ["*"] if scheme.weights is None else skip)
    layers = {} if scheme.weights is None else linear_layers(model, skip)
    replaced: dict[int, QuantizedLinear] = {}
    _check_all(layers)
    for part_scheme, part in by_scheme(layers, scheme, by_pattern).items():
        before = len(replaced)
        forms = quantize_layers(
            model, part, {"": part_scheme}, calibration, arithmetic=arithmetic,
            on_progress=lambda done, _, before=before: passed(before + done, len(layers)),
        )[""]  # fmt: skip
        replaced |= {id(part[name]): form for name, form in forms.items()}
    small = with_cache(exchanged(model, replaced), scheme)
    if scheme.caches_by_text:
        calibrate_cache(small, calibration)
    return small


def prepare_model(model: nn.Module, skip: Sequence[str] = ()) -> nn.Module:
    """Return a model of the same function as it is quantized: a decoder folded, and experts that no
    pattern in `skip` matches as linear layers. It shares all other weights with `model`.
    """
    if isinstance(model, Decoder):
        return folded(model)
    return unfuse_experts(
        model, lambda name: not any(fnmatchcase(name, pattern) for pattern in skip)
    )


def prepared_as(model: nn.Module, layers: Collection[str]) -> nn.Module:
    """Return a model of the same function that has linear layers of these names."""
    if isinstance(model, Decoder):
        return folded(model)
    return unfuse_experts(model, lambda name: any(layer.startswith(f"{name}.") for layer in layers))


def by_scheme(
    layers: Mapping[str, nn.Module], scheme: Scheme, others: Mapping[str, Scheme]
) -> dict[Scheme, dict[str, nn.Module]]:
    """Return the layers of each scheme, where those that match a pattern have another.

    Raises:
        WakefulError: a pattern matches nothing, or its scheme is not of weights alone.
    """
    parts: dict[Scheme, dict[str, nn.Module]] = {}
    used: set[str] = set()
    for name, layer in layers.items():
        patterns = [layer_scheme for layer_scheme in others if fnmatchcase(name, layer_scheme)]
        used.update(patterns)
        layer_scheme = others[patterns[0]] if patterns else scheme
        if layer_scheme.weights is None or (patterns and layer_scheme.cache is not None):
            raise WakefulError(
                f"{layer_scheme} for {patterns[0]}: a layer has weights, and no cache"
            )
        parts.setdefault(layer_scheme, {})[name] = layer
    unused = [pattern for pattern in others if pattern not in used]
    if unused:
        raise WakefulError(f"no layer that is left to quantize matches {unused[0]}")
    return parts


def _check_all(layers: Mapping[str, nn.Module]) -> None:
    """Raise `WakefulError` with the names of all layers that cannot be quantized."""
    refused = [name for name, layer in layers.items() if not is_finite(matrix(layer)[0])]
    if refused:
        more, count, leave = len(refused) - 1, "", "leave it as it is"
        if more:
            count = f" ({more} other layer{'s' * (more > 1)} cannot either)"
            leave = "leave them as they are"
        raise WakefulError(
            f"{refused[0]} cannot be quantized: its weight has a NaN or an infinity{count}; "
            f"{leave} with --skip {' '.join(refused)}"
        )


def scheme_of(model: nn.Module) -> Scheme | None:
    """Return a model's scheme, of its cache or else of most layers; None if it is not quantized."""
    caches = [module.scheme for module in model.modules() if isinstance(module, QuantizedCache)]
    schemes = Counter(caches[:1] or [module.scheme for module in quantized_layers(model).values()])
    return schemes.most_common(1)[0][0] if schemes else None


def quantized_layers(
    model: nn.Module, *, remove_duplicate: bool = True
) -> dict[str, QuantizedLinear]:
    """Return a model's quantized layers by name; one that is used in several places by its first
    name alone, unless `remove_duplicate` is false.
    """
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=remove_duplicate)
        if isinstance(module, QuantizedLinear)
    }


def linear_layers(model: nn.Module, skip: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Return the layers that `quantize` quantizes, by name, in the model's order.

    Raises:
        WakefulError: the model has a layer with a matrix that is neither a linear layer nor known
            to stay, is quantized already, or has no linear layer; or a pattern matches nothing.
    """
    _refuse_quantized(model)
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    routers = routers_of(model)
    layers: dict[str, nn.Module] = {}
    used, around = set[str](), set[str]()
    for name, module in model.named_modules():
        patterns = [pattern for pattern in skip if name and fnmatchcase(name, pattern)]
        matrices = any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
        (used if matrices else around).update(patterns)
        if patterns or isinstance(module, nn.Embedding) or id(module) in routers:
            continue
        if is_linear(module):
            if id(module.weight) not in embedded and not _stays(module.weight):
                layers[name] = module
        else:
            _refuse_matrices(name, module)
    unused = next((pattern for pattern in skip if pattern not in used), None)
    if unused is not None:
        inside = f"; what lies inside of it is '{unused}.*'" if unused in around else ""
        raise WakefulError(f"--skip {unused} matches no layer{inside}")
    if not layers:
        raise WakefulError(f"{type(model).__name__} has no linear layer to quantize")
    return layers


def _refuse_quantized(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedCache):
            raise WakefulError(f"the model is quantized already: {name} is {module.scheme}")


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is a linear layer whose product is all it does, or our heads."""
    if type(module) is Heads or isinstance(module, Conv1D):
        return True
    if not isinstance(module, nn.Linear):
        return False
    return type(module).forward is nn.Linear.forward or _only_multiplies(module)


@torch.no_grad()
def _only_multiplies(layer: nn.Linear) -> bool:
    """Tell whether a linear layer's own forward (Falcon's, for one) adds nothing to the product."""
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


def exchanged(model: nn.Module, replaced: Mapping[int, nn.Module]) -> nn.Module:
    """Return a copy with layers exchanged by identity; parameters and buffers are shared."""
    copied = with_modules(model, replaced)
    padded = any(
        layer.sees_padding for layer in replaced.values() if isinstance(layer, QuantizedLinear)
    )
    return by_sequence(copied) if padded and not isinstance(copied, Decoder) else copied
