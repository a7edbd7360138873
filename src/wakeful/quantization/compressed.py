"""Quantized models in the format of compressed-tensors, which stock Transformers and vLLM load.

Only stock architectures and the schemes that the format knows: files hold the quantized model's
codes and scales, and reading them takes no code of ours. A division of inputs (SmoothQuant) is
folded into the norm before, so that every layer stays of a standard class.
"""

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compressed_tensors.compressors import pack_to_int32
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.checkpoint_reader import corrected_config, narrow_exactly
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.families import FAMILIES
from wakeful.hf.read_back import RoundedParameters, embedding_rows, read_back
from wakeful.hf.transforms import FIELD, STATUS, make_transform_config
from wakeful.hf.weights_out import (
    create_folder,
    readable_tokenizer,
    stock_architecture,
    write_config,
    write_tensors,
    write_texts,
)
from wakeful.model.decoder import Decoder
from wakeful.model.turned import walsh_hadamard
from wakeful.paged import split_rows, store_like
from wakeful.probes.experts import is_fused, routers_of
from wakeful.probes.running import as_decoder
from wakeful.quantization.cache import QuantizedCache
from wakeful.quantization.convert import quantized_layers, scheme_of, skip_option
from wakeful.quantization.linear import QuantizedLinear, rotate_channels, weight_and_bias
from wakeful.quantization.norm_readers import readers_of_norms
from wakeful.quantization.schemes import Absmax, Grid, Scheme, Zeropoint
from wakeful.quantization.schemes.grids import E4M3, MxE2M1, NvE2M1
from wakeful.runs.checkpoint import unique_state
from wakeful.variants.implementations import SOFTMAX1, attention_implementation

FORMAT = "compressed-tensors"
_EXPERTS = r"re:.*\.experts\..*"
"""Pattern of the names of all experts' layers in files."""
_FUSED = ("qkv_proj", "gate_up_proj", "query_key_value", "Wqkv")
"""Ends of the names of layers that join several projections in one matrix of a file."""
_MEASURE_ONLY = "leave --save out to measure without saving"
_STORED = (
    "weights of 4 or 8 bits per channel or group without a zero point (w4a16), weights and inputs "
    "of 8 bits (w8a8, fp8, \"moderate(scales='static')\"), 4-bit floats (mxfp4, "
    "\"nvfp4(scales='static')\"), and keys and values of 8 bits with calibrated scales per tensor "
    "or head (\"scheme(cache=e4m3(per='tensor'))\")"
)
"""What compressed-tensors can hold, with schemes to name."""


def compressed_config(targets: Mapping[Scheme, Collection[str]]) -> dict[str, Any]:
    """Return the `quantization_config` of a model whose layers have these schemes.

    `targets` holds the layer names of each scheme; a single scheme also targets every "Linear". A
    scheme of the cache alone has no layers; the format of the cache is that of the first scheme
    that has one.

    Raises:
        WakefulError: the format does not support a scheme.
    """
    weight_schemes = {
        scheme: names for scheme, names in targets.items() if scheme.weights is not None
    }
    groups = [_config_group(scheme) for scheme in weight_schemes]
    # An engine looks up a layer that it fuses (queries, keys and values) by its class first, then
    # its parts by their names. With several schemes the class would not say which one it has.
    classes = ["Linear"] if len(groups) == 1 else []
    for group, names in zip(groups, weight_schemes.values(), strict=True):
        group["targets"] = [*classes, *names]
    storage_formats = {group["format"] for group in groups} or {"dense"}  # "dense": no weights
    caches = [_cache_args(scheme) for scheme in targets if scheme.cache is not None]
    return {
        "quant_method": FORMAT,
        "format": storage_formats.pop() if len(storage_formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        "kv_cache_scheme": caches[0] if caches else None,
        "global_compression_ratio": None,
    }


def _config_group(scheme: Scheme) -> dict[str, Any]:
    """Return the entry of a scheme in the configuration's `config_groups`, without its targets.

    Raises:
        WakefulError: the format does not support the scheme.
    """
    weights, inputs = scheme.weights, scheme.inputs
    storage = _storage_format(scheme)
    if weights is None or storage is None:
        raise _unsupported_scheme(scheme)
    group: dict[str, Any] = {
        "weights": _quantization_args(weights, dynamic=False),
        "input_activations": None,
        "output_activations": None,
        "format": storage,
    }
    if inputs is not None:
        # "local": of two levels of scales only those of groups are computed from each input.
        dynamic = "local" if inputs.two_scales else scheme.scales == "dynamic"
        group["input_activations"] = _quantization_args(inputs, dynamic=dynamic)
    return group


def _cache_args(scheme: Scheme) -> dict[str, Any]:
    """Return the configuration's `kv_cache_scheme`: the number format of keys and values.

    Raises:
        WakefulError: it is none of the number formats that engines read, whole numbers of 8 bits
            and e4m3, each with a scale per tensor or per head.
    """
    grid = scheme.cache
    if grid is None or grid not in (
        Absmax(bits=8, per="tensor"), Absmax(bits=8, per="head"),
        E4M3(per="tensor"), E4M3(per="head"),
    ):  # fmt: skip
        raise _unsupported_scheme(scheme)
    return _quantization_args(grid, dynamic=False)


def _unsupported_scheme(scheme: Scheme) -> WakefulError:
    return WakefulError(
        f"{scheme} cannot be saved as {FORMAT}, which stores only {_STORED}: name one of these "
        f"with --scheme, or {_MEASURE_ONLY}"
    )


def _storage_format(scheme: Scheme) -> str | None:
    """Return compressed-tensors' name, such as "pack-quantized", for the way in which a scheme's
    weights and inputs are stored; None if it has none for this scheme.
    """
    weights, inputs = scheme.weights, scheme.inputs
    if weights is None or scheme.outputs is not None:  # it has no quantized outputs
        return None
    is_static = inputs is None or scheme.scales == "static"
    if isinstance(weights, MxE2M1 | NvE2M1):  # floats of 4 bits
        grids = [weights] if inputs is None else [weights, inputs]
        is_supported = all(type(grid) is type(weights) for grid in grids)
        if weights.two_scales:  # one outer scale per tensor; that of inputs is static
            is_supported = is_supported and is_static and all(g.per == "tensor" for g in grids)
        name = "nvfp4" if weights.two_scales else "mxfp4"
        return f"{name}-pack-quantized" if is_supported else None
    if inputs is None:
        # No zero points: compressed-tensors 0.20 packs them when it writes and expects them
        # unpacked when it reads (`PackedQuantizationCompressor.compress` on the meta device).
        is_absmax = isinstance(weights, Absmax)
        is_packed = is_absmax and weights.bits in (4, 8) and weights.per == "channel"
        return "pack-quantized" if is_packed else None
    both_whole_numbers = type(weights) is type(inputs) is Absmax
    both_floats = type(weights) is type(inputs) is E4M3
    eight_bits = all(grid.bits == 8 and not grid.group for grid in (weights, inputs))
    if not (eight_bits and (both_whole_numbers or both_floats)):
        return None
    is_clipped = isinstance(inputs, Absmax) and inputs.clip != 1
    # An engine computes dynamic scales itself: per token, and from the whole range of the inputs.
    if not is_static and (inputs.per == "tensor" or is_clipped):
        return None
    return "int-quantized" if both_whole_numbers else "float-quantized"


def check_compressed(
    model: nn.Module,
    schemes: Mapping[str, Scheme],
    layers: Mapping[str, nn.Module],
    tokenizer: Tokenizer | None = None,
) -> None:
    """Raise `WakefulError` if `save_compressed` would refuse the model once it is quantized.

    Only names and shapes are looked at. `layers` are the layers to quantize, `schemes` their
    schemes, both by name; `tokenizer` is the one to write, where it is ours and not Transformers'.
    """
    for scheme in dict.fromkeys(schemes.values()):
        compressed_config({scheme: ()})  # raises for a scheme that the format does not support
    stock = _to_stock_model(model, layers)
    own_names = {layer: name for name, layer in layers.items()}
    stock_schemes = {name: schemes[own_names[layer]] for name, layer in stock.layers.items()}
    _match_transformers_layers(stock_schemes, stock, own_names, tokenizer)
    methods = {name: scheme.rounding for name, scheme in schemes.items()}
    divided = {name: method for name, method in methods.items() if method.divides_inputs}
    if divided:
        readers_by_norm = list(readers_of_norms(model).values())
        # In the file the norm divides, and all layers that read it get the divided output.
        for readers in readers_by_norm:
            num_divided = len(divided.keys() & set(readers))
            if 0 < num_divided < len(readers):  # some of them, but not all
                raise _different_divisors(readers)
        # A method with norms=True does not divide the inputs of layers that read no norm.
        always_divided = {name for name, method in divided.items() if not method.norms}
        _refuse_unfolded_divisors(always_divided.difference(*readers_by_norm))


def save_compressed(
    model: nn.Module,
    folder: Path,
    tokenizer: Tokenizer | Callable[[Path], None],
    *,
    card: str = "",
    stored: torch.dtype | None = None,
    context: int = 0,
) -> str:
    """Write a quantized model as a compressed-tensors folder and return its architecture's name.

    Transformers and vLLM load the folder. It appears only after it was read back successfully.

    Args:
        model: a quantized model.
        folder: the folder to create.
        tokenizer: our tokenizer, or a function that writes one into a folder.
        card: text of the README.md.
        stored: dtype of the tensors in full precision, by default the model's. A tensor that it
            would round, such as a scale, keeps its own dtype.
        context: context length to write where it is shorter than the model's; 0 keeps that.

    Raises:
        WakefulError: the folder exists or cannot be read back; or the format does not support the
            scheme, the architecture or a layer, which is named.
    """
    scheme = scheme_of(model)
    if scheme is None:
        raise WakefulError("the model is not quantized: nothing to save")
    # A layer that is used in several places is written once for each of them.
    all_layers = quantized_layers(model, remove_duplicate=False)
    # Refuse unsupported schemes first.
    compressed_config({scheme: (), **{layer.scheme: () for layer in all_layers.values()}})
    stock = _to_stock_model(model, all_layers)
    layers = {
        name: layer for name, layer in stock.layers.items() if isinstance(layer, QuantizedLinear)
    }
    decoder_tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else None
    schemes = {name: layer.scheme for name, layer in layers.items()}
    own_names: dict[nn.Module, str] = {layer: name for name, layer in all_layers.items()}
    layout, read_tokenizer = _match_transformers_layers(
        schemes, stock, own_names, decoder_tokenizer
    )
    tokenizer = read_tokenizer or tokenizer
    dtype = stored or next(model.parameters()).dtype
    config, tensors = stock.config, _file_tensors(stock, layers, layout, dtype)
    targets = _layer_targets(schemes, layout)
    if stock.caches:
        targets = targets or {scheme: []}  # a scheme of the cache alone has no layers
        tensors |= _cache_scales(stock.caches)
    settings = compressed_config(targets)
    if scheme.cache is not None:
        settings["kv_cache_scheme"] = _cache_args(scheme)
    settings["ignore"] = [name for name in layout.linears if name not in layers] + layout.routers
    # For experts that stay one tensor, vLLM looks up the names that separate experts would have.
    fused_names = [layout.file_names[name][0] for name in layout.experts - layers.keys()]
    fused_parents = {name.rsplit(".", 2)[0] for name in fused_names}
    settings["ignore"] += [rf"re:{re.escape(name)}\..*" for name in sorted(fused_parents)]
    if rotations := _input_rotations(model, stock, layers):
        rotations = [(matrix.to(dtype), names) for matrix, names in rotations]
        settings[FIELD], matrices = make_transform_config(rotations, layout.linears)
        settings["quantization_status"] = STATUS
        tensors |= matrices
    _set_shorter_context(config, model, context)
    config.quantization_config = settings  # pyright: ignore[reportAttributeAccessIssue]
    # compressed-tensors unpacks 4-bit floats to bfloat16, whatever dtype the rest has.
    has_float4 = any(isinstance(layer.grid, MxE2M1 | NvE2M1) for layer in layers.values())
    config.dtype = torch.bfloat16 if has_float4 else dtype
    with create_folder(folder, card) as part:
        if isinstance(tokenizer, Tokenizer):
            write_texts(tokenizer, part, config, embedding_rows(model))
        else:
            tokenizer(part)
        write_config(config, part)
        write_tensors(tensors, part)
        read_back(
            part,
            model,
            tokenizer=read_tokenizer,
            rounding=_emulate_reader(layers.values(), config.dtype),
        )
    return config.model_type


def _set_shorter_context(config: PreTrainedConfig, model: nn.Module, context: int) -> None:
    """Set a configuration's context length to `context` if that is shorter than the old one; 0
    keeps the old one.

    It is kept too if an embedding has that many rows: the rows are learned positions.
    """
    text_config: Any = config.get_text_config(decoder=True)
    old_context = getattr(text_config, "max_position_embeddings", None) or 0
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    learned_positions = any(table.num_embeddings == old_context for table in embeddings)
    if 0 < context < old_context and not learned_positions:
        text_config.max_position_embeddings = context


def file_bytes(folder: Path) -> int:
    """Return the bytes of a folder's safetensors files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def state_bytes(model: nn.Module, stored: torch.dtype | None = None) -> int:
    """Return the bytes that a model's weights take in a file, shared ones counted once.

    A tensor that is not quantized counts in the dtype `stored` if that holds its numbers exactly,
    else in its own; with `stored` None in its own.
    """
    layers, size = quantized_layers(model), 0
    for name, tensor in unique_state(model).items():
        owner, _, leaf = name.rpartition(".")
        is_code_or_scale = owner in layers and leaf != "bias"
        dtype = None if is_code_or_scale else stored  # codes and scales keep their dtype
        size += narrow_exactly(tensor, dtype).nbytes
    return size


@contextmanager
def _emulate_reader(layers: Iterable[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Make quantized layers compute, within the context, about as a library does that loads their
    file: with weights unpacked to `dtype`. All other parameters are rounded to `dtype` too.

    Inputs are not rounded at all. A library may round them by slightly other scales than ours;
    `read_back` allows a small multiple of the difference that this context makes.
    """
    quantized_linears = {layer for layer in layers if isinstance(layer, QuantizedLinear)}
    try:
        for layer in quantized_linears:
            layer.linear = partial(_linear_in_dtype, layer, dtype)
        with RoundedParameters(lambda weight: weight.to(dtype)):
            yield
    finally:
        for layer in quantized_linears:
            del layer.linear  # now the method of the class is found again


def _linear_in_dtype(layer: QuantizedLinear, dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return a quantized layer's output for unrounded inputs, its dequantized weights rounded to
    `dtype`; the arithmetic is float32.
    """
    rows = layer.transform_inputs(x)
    bias = None if layer.bias is None else layer.bias.float()
    y = F.linear(rows, layer.dequantize().to(dtype).float(), bias)
    return y.to(x.dtype).view(*x.shape[:-1], layer.out_features)


def _quantization_args(grid: Grid, *, dynamic: bool | str) -> dict[str, Any]:
    """Return a number format as compressed-tensors' `QuantizationArgs`.

    `dynamic` tells whether scales are computed from each input; "local" means that only those of
    groups are.
    """
    strategy = "group" if grid.group else grid.per
    if strategy == "head":
        strategy = "attn_head"  # the format's name for it
    if grid.two_scales:
        strategy = "tensor_group"
    arguments = {
        "num_bits": grid.bits,
        "type": "int" if isinstance(grid, Absmax | Zeropoint) else "float",
        "symmetric": grid.symmetric,
        "strategy": strategy,
        "group_size": grid.group or None,
        "dynamic": dynamic,
    }
    scale_dtype = _stored_scale_dtype(grid)
    return arguments | ({"scale_dtype": str(scale_dtype)} if scale_dtype else {})


def _stored_scale_dtype(grid: Grid) -> torch.dtype | None:
    """Return the dtype in which files store the scales of groups; None for the model's dtype."""
    if isinstance(grid, MxE2M1):
        return torch.uint8
    return torch.float8_e4m3fn if isinstance(grid, NvE2M1) else None


@dataclass(frozen=True)
class _StockModel:
    """A model's parts under the names that its stock Transformers architecture gives them."""

    config: PreTrainedConfig
    tensors: Mapping[str, Tensor]
    """Parameters in full precision."""
    layers: dict[str, nn.Module]
    """Layers that are quantized, or will be."""
    rotated: Sequence[str] = ()
    """Names of the layers whose inputs an inner rotation has rotated."""
    caches: Mapping[str, QuantizedCache] = field(default_factory=dict)
    """Quantized caches, by the name of the attention layer."""


@dataclass(frozen=True)
class _TransformersLayout:
    """Names of a model's layers in Transformers' modules and files."""

    linears: Mapping[str, tuple[int, int]]
    """The shape (N, K) of every `nn.Linear`."""
    file_names: Mapping[str, list[str]]
    """Names in files of the weights and layers whose names differ there, several for an expert's
    fused gate and up projections."""
    experts: Set[str]
    """Names of the experts' layers, which files store separately."""
    routers: list[str]
    """Names in files of the layers that choose experts."""


def _file_tensors(
    stock: _StockModel,
    layers: Mapping[str, QuantizedLinear],
    layout: _TransformersLayout,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return all tensors to write, by their names in files: those in full precision, and the codes
    and scales of the quantized `layers`.

    A tensor is converted to `dtype` where that changes no number. A quantized expert's fused gate
    and up projection is cut by rows into the two that files hold.
    """
    file_names = layout.file_names
    # A tensor in full precision is never cut, so it has one name.
    tensors = {
        file_names.get(name, [name])[0]: tensor.detach() for name, tensor in stock.tensors.items()
    }
    for name, layer in layers.items():
        layer_names = file_names.get(name, [name])
        num_rows = layer.out_features // len(layer_names)  # of one of the layers in the file
        for part, whole in _layer_file_tensors(layer).items():
            for index, file_name in enumerate(layer_names):
                piece = whole
                # The shape is written anew; all other parts have a row for each output.
                if part == "weight_shape":
                    piece = torch.tensor([num_rows, layer.in_features])
                elif len(layer_names) > 1:
                    piece = whole[index * num_rows : (index + 1) * num_rows].clone()
                # In the same kind of memory as the layer's codes: RAM, or a paged temporary file.
                tensors[f"{file_name}.{part}"] = store_like(layer.integers, piece)
    return {name: narrow_exactly(tensor, dtype) for name, tensor in tensors.items()}


def _cache_scales(caches: Mapping[str, QuantizedCache]) -> dict[str, Tensor]:
    """Return the fixed scales of keys and values by the names that compressed-tensors gives them,
    such as "model.layers.0.self_attn.k_scale": (1,), or (G, 1, 1) where each head has one.

    `caches` holds the quantized caches by the names of their attention layers.
    """
    scales: dict[str, Tensor] = {}
    for name, cache in caches.items():
        shape = (-1, 1, 1) if cache.grid.per == "head" else (1,)
        scales[f"{name}.k_scale"] = cache.fixed_scales("keys").scale.reshape(shape)
        scales[f"{name}.v_scale"] = cache.fixed_scales("values").scale.reshape(shape)
    return scales


def _layer_targets(
    schemes: Mapping[str, Scheme], layout: _TransformersLayout
) -> dict[Scheme, list[str]]:
    """Return the layer names to list as `targets` of each scheme in the configuration.

    `schemes` holds the scheme of each quantized layer by its name in Transformers. A single scheme
    also targets the class "Linear" (`compressed_config`), so only the output head is listed. Of
    several schemes all layers are listed, the experts by one pattern.
    """
    targets: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        targets.setdefault(scheme, []).append(name)
    if len(targets) == 1:
        # vLLM's output head is not of a class named Linear, so it is found by its name alone. Its
        # name is the only one without a dot.
        (scheme,) = targets
        return {scheme: [name for name in schemes if "." not in name]}
    for scheme, names in targets.items():
        targets[scheme] = [name for name in names if name not in layout.experts]
        has_experts = len(targets[scheme]) < len(names)
        if has_experts:  # Transformers looks for a scheme with a pattern of experts
            targets[scheme].append(_EXPERTS)
    return targets


def _match_transformers_layers(
    schemes: Mapping[str, Scheme],
    stock: _StockModel,
    own_names: Mapping[nn.Module, str],
    tokenizer: Tokenizer | None,
) -> tuple[_TransformersLayout, Tokenizer | None]:
    """Check that Transformers can hold every quantized layer and the tokenizer.

    `schemes` holds the layers' schemes by their names in Transformers, and `own_names` the layers'
    names in the model. Returns Transformers' layout of the model, and the tokenizer as Transformers
    reads it; None for no tokenizer.

    Raises:
        WakefulError: a layer, or the tokenizer, has no equivalent there.
    """
    model_type, layout = stock.config.model_type, _transformers_layout(stock.config)
    _check_experts(schemes, stock, layout)
    widths: dict[str, int] = {}
    for name, layer in stock.layers.items():
        if isinstance(layer, QuantizedLinear):
            shape = (layer.out_features, layer.in_features)
        else:  # not quantized yet
            shape = weight_and_bias(layer)[0].shape
        widths[name] = shape[1]
        if name not in layout.experts and layout.linears.get(name) != tuple(shape):
            raise WakefulError(
                f"{FORMAT} holds an nn.Linear of Transformers, or an expert that files store by "
                f"itself, and {name} of a {model_type} is neither: {_MEASURE_ONLY}"
            )
    _check_group_widths(schemes, widths)
    _check_rotations(schemes, stock, own_names)
    read_tokenizer = None if tokenizer is None else readable_tokenizer(tokenizer, stock.config)
    if tokenizer is not None and read_tokenizer is None:
        raise WakefulError(
            f"Transformers reads another tokenizer for a {model_type} than this model's: "
            f"{_MEASURE_ONLY}"
        )
    return layout, read_tokenizer


def _check_experts(
    schemes: Mapping[str, Scheme], stock: _StockModel, layout: _TransformersLayout
) -> None:
    """Raise `WakefulError` unless all experts' layers are quantized by one scheme that Transformers
    can read for experts, or none are.

    `schemes` holds the schemes of the quantized layers by their names in Transformers.
    """
    expert_by_scheme = {schemes[name]: name for name in stock.layers if name in layout.experts}
    if len(expert_by_scheme) > 1:
        raise WakefulError(
            f"{' and '.join(expert_by_scheme.values())} are experts of several schemes, and "
            f"Transformers reads all experts by one: {_MEASURE_ONLY}"
        )
    for scheme, name in expert_by_scheme.items():
        is_weight_only = scheme.inputs is None and not scheme.rotation
        if not (is_weight_only and isinstance(scheme.weights, Absmax)):
            raise WakefulError(
                f"{name} is an expert, which engines read from {FORMAT} only in whole numbers, "
                f"with inputs neither quantized nor rotated: use --scheme w4a16, or {_MEASURE_ONLY}"
            )
    for tensor_name in stock.tensors:  # those in full precision
        name = tensor_name.removesuffix(".weight")
        # Experts are separate layers only if some are quantized; else they are one fused tensor.
        if name in layout.experts:
            raise WakefulError(
                f"{name} alone stays in full precision, and {FORMAT} has one format for all "
                f"experts of a layer: skip them all with --skip {name.rsplit('.', 2)[0]}, or "
                f"{_MEASURE_ONLY}"
            )


def _check_rotations(
    schemes: Mapping[str, Scheme], stock: _StockModel, own_names: Mapping[nn.Module, str]
) -> None:
    """Raise `WakefulError` if vLLM cannot rotate the inputs of layers whose schemes say so.

    `schemes` holds the layers' schemes by their names in Transformers, and `own_names` the layers'
    names in the model, which the error gives as patterns.
    """
    refused: list[str] = []
    for name, layer in stock.layers.items():
        is_head, is_fused = "." not in name, name.endswith(_FUSED)
        if schemes[name].rotation and (
            is_head or is_fused or layer.bias is not None or name in stock.rotated
        ):
            refused.append(own_names[layer])
    if refused:
        raise WakefulError(
            "vLLM cannot rotate the inputs of the output head, of layers with a bias, of several "
            "projections in one matrix, or of layers after an inner rotation: "
            f"{skip_option(refused)}, choose a scheme without a rotation, or {_MEASURE_ONLY}"
        )


def _check_group_widths(schemes: Mapping[str, Scheme], widths: Mapping[str, int]) -> None:
    """Raise `WakefulError` if a layer's input channels are not a multiple of its group size.

    `widths` holds the number of input channels of each layer.
    """
    for name, width in widths.items():
        scheme, grid = schemes[name], schemes[name].weights
        if grid is None or grid.has_whole_groups(width):
            continue
        advice = ""
        if isinstance(grid, Absmax):  # other formats have groups of one size
            # Advise the largest power of two that divides all widths and is no larger than the
            # group that was asked for.
            common_divisor = math.gcd(*widths.values())
            largest_in_widths = common_divisor & -common_divisor  # its lowest bit
            largest_in_group = 2 ** (grid.group.bit_length() - 1)
            size = min(largest_in_widths, largest_in_group)
            smaller = Scheme(
                weights=replace(grid, group=size), inputs=scheme.inputs, method=scheme.method,
                cache=scheme.cache, rotation=scheme.rotation,
            )  # fmt: skip
            advice = f"use --scheme {smaller.with_scales(scheme.scales).expression!r}, or "
        raise WakefulError(
            f"{name} reads {width} channels, which are not whole groups of "
            f"{grid.group}, and {FORMAT} has no shorter last group: {advice}{_MEASURE_ONLY}"
        )


def _to_stock_model(model: nn.Module, quantized: Mapping[str, nn.Module]) -> _StockModel:
    """Return a model's parts under the names of its stock Transformers architecture.

    `quantized` are the layers that are quantized, or will be, by their names in the model.

    Raises:
        WakefulError: the model is not of a stock architecture, or a part has no equivalent there.
    """
    parameters = dict[str, Tensor](model.named_parameters(remove_duplicate=False))
    parameters |= _fold_divisors(model)
    caches = {
        name: part for name, part in model.named_modules() if isinstance(part, QuantizedCache)
    }
    if as_decoder(model) is not None:
        return _decoder_to_stock_model(model, quantized, parameters, caches)
    assert isinstance(model, PreTrainedModel)
    if attention_implementation(model) == SOFTMAX1:
        raise WakefulError(
            f"{FORMAT} has no place for softmax-1, by which this {type(model).__name__} "
            f"attends (attn_implementation = {SOFTMAX1!r}): {_MEASURE_ONLY}"
        )
    # Files hold persistent buffers too, such as a router's correction and a scale in Gemma 4.
    buffers = {
        name: tensor for name, tensor in model.state_dict(keep_vars=True).items()
        if not isinstance(tensor, nn.Parameter)
    }  # fmt: skip
    tensors = parameters | buffers
    full_precision: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        owner = name.rpartition(".")[0]
        if owner in quantized or owner in caches:  # written as codes and scales
            continue
        tied_to = model.all_tied_weights_keys.get(name, "")
        if tensor is tensors.get(tied_to):  # Transformers ties the two again as it loads the model
            continue
        full_precision[name] = tensor
    caches_by_attention = {name.rpartition(".")[0]: cache for name, cache in caches.items()}
    return _StockModel(
        corrected_config(model), full_precision, dict(quantized), caches=caches_by_attention
    )


def _decoder_to_stock_model(
    model: nn.Module,
    quantized: Mapping[str, nn.Module],
    parameters: dict[str, Tensor],
    caches: Mapping[str, QuantizedCache],
) -> _StockModel:
    """Return the parts of our `Decoder` under the names of the stock architecture that computes the
    same.

    `quantized` and `caches` are its quantized layers and caches, and `parameters` all parameters,
    by their names in the decoder. A link of the model's family names one tensor of Transformers
    and the tensors of ours from which it is joined.

    Raises:
        WakefulError: no stock architecture is equal, or a part has no equivalent there.
    """
    assert isinstance(model, Decoder)
    tensors_by_name = parameters | dict(model.named_buffers())  # a buffer: softmax-1's constant
    plain = dataclasses.replace(model.config, mlp_rotation=False)  # written as a transform instead
    model_type, config = stock_architecture(plain)
    if model_type == WakefulConfig.model_type:
        raise WakefulError(
            f"{FORMAT} is for stock architectures, and this is our own class: {_MEASURE_ONLY}; "
            "the cures --rotate hadamard, --rotate_inner and --sinks leave a stock one"
        )
    family = FAMILIES[model_type]
    rotated: list[str] = []
    attentions: dict[str, QuantizedCache] = {}
    layers: dict[str, nn.Module] = {}
    tensors: dict[str, Tensor] = {}
    for link in family.links(plain):
        hf_name = family.checkpoint_name(link.hf_name)
        owners = [part.rpartition(".")[0] for part in link.decoder_names]  # layers of the tensors
        for owner in owners:
            # The layer of the keys is a part of our attention, and its name in Transformers begins
            # with that of Transformers' attention, to which the cache belongs.
            attention, _, leaf = owner.rpartition(".")
            cache = caches.get(f"{attention}.quantized")
            if cache is not None and leaf == "key":
                attentions[hf_name.rsplit(".", 2)[0]] = cache
        if model.config.mlp_rotation and owners[0].endswith(".mlp.down"):
            if hf_name.endswith(".bias"):
                raise WakefulError(
                    f"{hf_name} is a bias of a layer whose inputs are rotated, which vLLM lacks: "
                    f"{_MEASURE_ONLY}, or cure without --rotate_inner"
                )
            rotated.append(hf_name.rpartition(".")[0])
        if not any(owner in quantized for owner in owners):
            parts = [tensors_by_name[part].detach() for part in link.decoder_names]
            tensors[hf_name] = link.join(parts)
        elif len(owners) > 1:
            raise WakefulError(
                f"{FORMAT} has one number format per matrix, and {hf_name} of a {model_type} joins "
                f"several of ours: {_MEASURE_ONLY}"
            )
        else:
            layers[hf_name.rpartition(".")[0]] = quantized[owners[0]]
    return _StockModel(config, tensors, layers, rotated, attentions)


def rotates_inputs(model: nn.Module) -> bool:
    """Tell whether a quantized model rotates inputs of its layers while it runs: by an inner
    rotation, or by a scheme.
    """
    decoder = as_decoder(model)
    has_inner_rotation = decoder is not None and decoder.config.mlp_rotation
    return has_inner_rotation or any(
        layer.scheme.rotation for layer in quantized_layers(model).values()
    )


def _input_rotations(
    model: nn.Module, stock: _StockModel, layers: Mapping[str, QuantizedLinear]
) -> list[tuple[Tensor, Sequence[str]]]:
    """Return the matrices (n, n) by which layers multiply every n of their inputs, each with the
    names of these layers: the inner rotation of a cured model, and those of schemes.
    """
    rotations: list[tuple[Tensor, Sequence[str]]] = []
    if stock.rotated:
        rotations.append((_inner_rotation(model), stock.rotated))
    names_by_size: dict[int, list[str]] = {}
    for name, layer in layers.items():
        names_by_size.setdefault(layer.scheme.rotation, []).append(name)
    names_by_size.pop(0, None)
    for size, names in names_by_size.items():
        matrix = rotate_channels(torch.eye(size, device=layers[names[0]].scale.device), size)
        rotations.append((matrix, names))
    return rotations


def _inner_rotation(model: nn.Module) -> Tensor:
    """Return the matrix M (K, K) of a decoder with rotated feed-forward inputs: every `down`
    projection reads x M in place of its inputs x.
    """
    down: Any = model.get_submodule("blocks.0.mlp.down")
    return walsh_hadamard(torch.eye(down.in_features, device=next(model.parameters()).device))


def _weight_offset(norm: nn.Module) -> float:
    """Return the constant c that a norm adds to its weight w: 1 in a Gemma model, 0 in most others.

    It is measured on a copy of the norm without its bias. The output is linear in the weight,
    y(w) = n (w + c) with the normalized input n, so that c = |y(0)| / (|y(1)| − |y(0)|).
    """
    norm = copy.deepcopy(norm).float().requires_grad_(False)
    weight = norm.get_parameter("weight")
    if getattr(norm, "bias", None) is not None:
        norm.get_parameter("bias").zero_()
    x = torch.linspace(1, 2, len(weight), device=weight.device)[None, None]
    weight.fill_(0.0)
    size_at_0 = norm(x).abs().sum()
    weight.fill_(1.0)
    size_at_1 = norm(x).abs().sum()
    return round(float(size_at_0 / (size_at_1 - size_at_0)), 3)


def _transformers_layout(config: PreTrainedConfig) -> _TransformersLayout:
    """Return the layer names and shapes of the Transformers model with this configuration."""
    with torch.device("meta"):  # shapes without memory
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    modules = dict(skeleton.named_modules())
    linears = {
        name: (module.out_features, module.in_features)
        for name, module in modules.items()
        if isinstance(module, nn.Linear)
    }
    file_names: dict[str, list[str]] = {}
    experts: set[str] = set()
    if any(map(is_fused, modules.values())):
        file_names, experts = _expert_file_names(skeleton, modules)
    router_ids = routers_of(skeleton)  # empty for a model without experts
    routers = [file_names[name][0] for name, module in modules.items() if id(module) in router_ids]
    return _TransformersLayout(linears, file_names, experts, routers)


def _expert_file_names(
    skeleton: PreTrainedModel, modules: Mapping[str, nn.Module]
) -> tuple[dict[str, list[str]], set[str]]:
    """Return two things about a model with fused experts: the names in files of each tensor and
    layer, by its name in the model, and the names of the experts' layers.

    An expert's layer is named after the fused tensor and its number: "mlp.experts.gate_up_proj.0".
    Each tensor's numbers are replaced by an index; a fused tensor has one per expert, or two where
    it joins gate and up. Transformers' own conversion to the file layout shows where each index
    goes.
    """
    names: list[str] = []  # for each index, the tensor or expert's layer that it stands for
    indices: dict[str, Tensor] = {}
    for name, tensor in skeleton.state_dict().items():
        parts, part_indices = [name], torch.tensor([len(names)])
        if tensor.ndim == 3 and is_fused(modules[name.rpartition(".")[0]]):
            halves = 2 if name.endswith("gate_up_proj") else 1
            parts = [f"{name}.{expert}" for expert in range(len(tensor)) for _ in range(halves)]
            part_indices = torch.arange(len(names), len(names) + len(parts)).view(-1, halves, 1)
        indices[name] = part_indices
        names += parts
    converted = revert_weight_conversion(skeleton, indices).items()
    # A tensor with several indices is fused in files too: it is left out.
    by_index = {int(index): file_name for file_name, index in converted if index.numel() == 1}
    experts = {names[index] for index in by_index} - indices.keys()  # without whole tensors
    file_names: dict[str, list[str]] = {}
    for index in sorted(by_index):
        file_names.setdefault(names[index], []).append(by_index[index])
    # Add the layers: their names are those of their weights without the suffix.
    for name, tensor_names in [*file_names.items()]:
        layer = name.removesuffix(".weight")
        file_names[layer] = [tensor_name.removesuffix(".weight") for tensor_name in tensor_names]
    return file_names, experts


def _fold_divisors(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and biases of norms, by name, with the divisors of the layers that read
    the norms folded in.

    SmoothQuant divides a layer's inputs. A file has no such division, so the norm before the layer
    does it. Norms whose readers divide nothing are left out. The model itself stays unchanged.

    Raises:
        WakefulError: a divisor cannot be folded into a norm.
    """
    divisors = {
        name: layer.divisor
        for name, layer in quantized_layers(model).items()
        if layer.divisor is not None and not bool((layer.divisor == 1).all())
    }
    if not divisors:
        return {}
    is_decoder = as_decoder(model) is not None
    folded: dict[str, Tensor] = {}
    for name, readers in readers_of_norms(model).items():
        reader_divisors = [divisors.pop(reader) for reader in readers if reader in divisors]
        if not reader_divisors:
            continue
        divisor = reader_divisors[0]
        all_equal = all(torch.equal(other, divisor) for other in reader_divisors)
        if len(reader_divisors) < len(readers) or not all_equal:
            raise _different_divisors(readers)
        norm = model.get_submodule(name)
        # Norms of our decoder multiply by their weight, others perhaps by weight + 1.
        weight_offset = 0.0 if is_decoder else _weight_offset(norm)
        for part, offset in (("weight", weight_offset), ("bias", 0.0)):
            parameter = getattr(norm, part, None)
            if parameter is not None:
                # The norm uses parameter + offset: that sum is divided.
                value = (parameter.detach().float() + offset) / divisor - offset
                folded[f"{name}.{part}"] = value.to(parameter.dtype)
    _refuse_unfolded_divisors(divisors)
    return folded


def _different_divisors(readers: Collection[str]) -> WakefulError:
    return WakefulError(
        f"{', '.join(readers)} read one norm and divide it differently: --skip all of them or "
        f"none, or {_MEASURE_ONLY}"
    )


def _refuse_unfolded_divisors(layers: Collection[str]) -> None:
    """Raise `WakefulError` if there are any `layers`: they divide their inputs, and no norm can do
    it for them in a file.
    """
    if layers:
        raise WakefulError(
            f"{min(layers)} divides its inputs, and there is no norm before it that could do so in "
            "a file: write method=smooth(norms=True)"
        )


def _layer_file_tensors(layer: QuantizedLinear) -> dict[str, Tensor]:
    """Return a quantized layer's tensors by the names that compressed-tensors gives them, such as
    `weight_packed` and `weight_scale`.
    """
    grid, operands = layer.grid, layer.operands
    tensors = {} if layer.bias is None else {"bias": layer.bias}
    if isinstance(grid, MxE2M1 | NvE2M1):
        tensors["weight_packed"] = layer.integers
        scale_dtype = _stored_scale_dtype(grid)
        assert scale_dtype is not None
        tensors["weight_scale"] = layer.scale.view(scale_dtype)
        for name, outer in (("weight", layer.outer), ("input", layer.input_scale)):
            if outer is not None:  # the format divides by its outer scale, where we multiply
                tensors[f"{name}_global_scale"] = outer.reshape(1).reciprocal()
        return tensors
    # Scales of 8 bits, which the layer holds as bytes, are written as decoded numbers.
    scale = layer.scale if grid.scale_type.itemsize > 1 else operands.scales.scale
    tensors["weight_scale"] = scale.reshape(1) if grid.per == "tensor" else scale
    if layer.scheme.inputs is None:  # then the format packs the codes into words of 32 bits
        words = [pack_to_int32(rows, grid.bits) for rows in split_rows(operands.integers)]
        tensors["weight_packed"] = torch.cat(words)
        tensors["weight_shape"] = torch.tensor([layer.out_features, layer.in_features])
        return tensors
    tensors["weight"] = operands.integers
    if isinstance(grid, E4M3):
        tensors["weight"] = operands.integers.view(torch.float8_e4m3fn)
    if layer.input_scale is not None:
        tensors["input_scale"] = layer.input_scale.reshape(1)
    return tensors
