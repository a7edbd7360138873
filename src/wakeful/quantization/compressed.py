"""Quantized models in the format of compressed-tensors, which stock Transformers and vLLM load.

Stock architectures only, and schemes that the format has: the numbers and scales are those of the
quantized model, and nothing of ours is needed to read them. A division of inputs (SmoothQuant) goes
into the norm before, so that the model has no layer of another kind.
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
from wakeful.model.turned import WalshHadamard
from wakeful.paged import split_rows, store_like
from wakeful.probes.experts import is_fused, routers_of
from wakeful.probes.running import as_decoder
from wakeful.quantization.cache import QuantizedCache
from wakeful.quantization.convert import quantized_layers, scheme_of
from wakeful.quantization.linear import QuantizedLinear, matrix
from wakeful.quantization.norm_readers import readers_of_norms
from wakeful.quantization.schemes import Absmax, Grid, Scheme, Zeropoint
from wakeful.quantization.schemes.grids import E4M3, MxE2M1, NvE2M1
from wakeful.runs.checkpoint import unique_state
from wakeful.variants.implementations import SOFTMAX1, attention_implementation

FORMAT = "compressed-tensors"
_EXPERTS = r"re:.*\.experts\..*"
"""The target of all experts, as files name them."""
_OTHERWISE = "leave --save out to measure it alone"


def compressed_config(targets: Mapping[Scheme, Collection[str]]) -> dict[str, Any]:
    """Return schemes with the layers of each as the `quantization_config` of a configuration.

    One scheme alone is that of every linear layer, and of the named ones. All have one cache.

    Raises:
        WakefulError: the format lacks a scheme.
    """
    of_layers = {s: names for s, names in targets.items() if s.weights is not None}
    groups = [_config_group(scheme) for scheme in of_layers]
    for group, names in zip(groups, of_layers.values(), strict=True):
        # An engine looks for a fused layer by its class before it looks for its parts by name.
        group["targets"] = [*([] if len(groups) > 1 else ["Linear"]), *names]
    forms = {group["format"] for group in groups} or {"dense"}
    caches = [_cache_arguments(scheme) for scheme in targets if scheme.cache is not None]
    return {
        "quant_method": FORMAT,
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "kv_cache_scheme": caches[0] if caches else None,
        "global_compression_ratio": None,
    }


def _config_group(scheme: Scheme) -> dict[str, Any]:
    """Return a scheme as one of the `config_groups`, without targets.

    Raises:
        WakefulError: the format lacks it.
    """
    weights, inputs = scheme.weights, scheme.inputs
    assert weights is not None
    if scheme.outputs is not None:
        raise _lacks(scheme, "schemes of weights, inputs and the cache", "w8a8 or w4a16")
    integers = isinstance(weights, Absmax | Zeropoint)
    if isinstance(weights, MxE2M1 | NvE2M1):
        form = _four_bit_floats(scheme, weights, inputs)
    elif inputs is None:
        if not integers or weights.bits not in (4, 8) or weights.per != "channel":
            allowed = "weight-only schemes of 4 or 8 bits per channel or group"
            raise _lacks(scheme, allowed, "w4a16")
        if not weights.symmetric:
            # Its package 0.20 packs zero points when it writes and expects them unpacked when it
            # reads (`PackedQuantizationCompressor.compress` on the meta device).
            symmetric = _expression(
                scheme, Absmax(bits=weights.bits, per="channel", group=weights.group)
            )
            raise _lacks(scheme, "weights without a zero point, such as absmax", repr(symmetric))
        form = "pack-quantized"
    else:
        kinds = [kind for kind in (Absmax, E4M3) if type(weights) is type(inputs) is kind]
        if not kinds or weights.bits != 8 or inputs.bits != 8 or weights.group or inputs.group:
            allowed = "weights and inputs that are both 8-bit absmax or both fp8, ungrouped"
            raise _lacks(scheme, allowed, "w8a8 or fp8")
        if inputs.per == "tensor" and scheme.scales == "dynamic":
            allowed = "per-tensor input scales that are static"
            raise _lacks(scheme, allowed, f"{scheme.expression!r} --scales static")
        if isinstance(inputs, Absmax) and inputs.clip != 1 and scheme.scales == "dynamic":
            raise _lacks(scheme, "dynamic input scales without clipping", "w8a8")
        form = "int-quantized" if integers else "float-quantized"
    group: dict[str, Any] = {
        "weights": _arguments(weights, dynamic=False),
        "input_activations": None,
        "output_activations": None,
        "format": form,
    }
    if inputs is not None:
        # Scales of groups in a tensor with static t are local.
        dynamic = "local" if inputs.two_scales else scheme.scales == "dynamic"
        group["input_activations"] = _arguments(inputs, dynamic=dynamic)
    return group


def _cache_arguments(scheme: Scheme) -> dict[str, Any]:
    """Return the grid of a scheme's keys and values as the `kv_cache_scheme`.

    Raises:
        WakefulError: the format, or what reads it, lacks the grid.
    """
    grid = scheme.cache
    fits = isinstance(grid, Absmax | E4M3) and grid.bits == 8 and grid.per == "tensor"
    if grid is None or not fits or (isinstance(grid, Absmax) and grid.clip != 1):
        instead = "\"scheme(cache=e4m3(per='tensor'))\""
        raise _lacks(scheme, "keys and values in 8 bits, a calibrated scale per tensor", instead)
    return _arguments(grid, dynamic=False)


def check_compressed(
    model: nn.Module,
    schemes: Mapping[str, Scheme],
    layers: Mapping[str, nn.Module],
    tokenizer: Tokenizer | None = None,
) -> None:
    """Raise `WakefulError` where `save_compressed` would refuse the model with these `layers`
    quantized, by shapes alone; `schemes` are theirs by name, and `tokenizer` is ours, where that is
    the one to write.
    """
    for scheme in dict.fromkeys(schemes.values()):
        compressed_config({scheme: ()})
    stock = _stock(model, layers)
    names = {layer: name for name, layer in layers.items()}
    _checked({name: schemes[names[layer]] for name, layer in stock.layers.items()}, stock,
             tokenizer)  # fmt: skip
    divided = {name: scheme.rounding for name, scheme in schemes.items() if scheme.rounding.divides}
    if divided:
        read = list(readers_of_norms(model).values())
        for readers in read:
            if 0 < len(divided.keys() & set(readers)) < len(readers):
                raise _differ(readers)
        alone = {name for name, method in divided.items() if not method.norms}
        _refuse_divided(alone - {name for readers in read for name in readers})


def can_compress(
    model: nn.Module,
    scheme: Scheme,
    layers: Mapping[str, nn.Module],
    tokenizer: Callable[[], Tokenizer | None],
) -> bool:
    """Tell whether `check_compressed` refuses nothing under one scheme; `tokenizer` returns what it
    takes.
    """
    try:
        compressed_config({scheme: ()})
        check_compressed(model, dict.fromkeys(layers, scheme), layers, tokenizer())
    except WakefulError:
        return False
    return True


def save_compressed(
    model: nn.Module,
    folder: Path,
    tokenizer: Tokenizer | Callable[[Path], None],
    *,
    card: str = "",
    stored: torch.dtype | None = None,
    context: int = 0,
) -> str:
    """Write a quantized model as a folder that Transformers loads where compressed-tensors is
    installed, whole or not at all; return the architecture.

    The folder's type is the one its weights were `stored` in before, or the model's own. What that
    type would round, scales above all, stays as it is. `tokenizer` is ours, or what writes one into
    a folder; `card` becomes README.md. A `context` shorter than the model's is written as its own.
    It is read back before it has its name.

    Raises:
        WakefulError: the folder exists, or cannot be read back; or the format has no place for the
            scheme, the architecture or a layer, which is named.
    """
    scheme = scheme_of(model)
    if scheme is None:
        raise WakefulError("the model is not quantized: nothing to save")
    # A layer may stand in several places, each of which has its own tensors in a file.
    places = quantized_layers(model, remove_duplicate=False)
    # Which refuses a scheme before anything else is looked at.
    compressed_config({scheme: (), **{layer.scheme: () for layer in places.values()}})
    stock = _stock(model, places)
    layers = {
        name: layer for name, layer in stock.layers.items() if isinstance(layer, QuantizedLinear)
    }
    decoder_tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else None
    schemes = {name: layer.scheme for name, layer in layers.items()}
    there, read = _checked(schemes, stock, decoder_tokenizer)
    tokenizer = read or tokenizer
    dtype = stored or next(model.parameters()).dtype
    config, tensors = stock.config, _tensors(stock, layers, there, dtype)
    targets = _targets(schemes, there)
    if stock.caches:
        targets = targets or {scheme: []}
        tensors |= _cache_scales(stock.caches)
    table = compressed_config(targets)
    if scheme.cache is not None:
        table["kv_cache_scheme"] = _cache_arguments(scheme)
    table["ignore"] = [name for name in there.linears if name not in layers] + there.routers
    # Of experts that stay one tensor vLLM asks for the names that they would have by themselves.
    unsplit = {there.places[name][0].rsplit(".", 2)[0] for name in there.experts - layers.keys()}
    table["ignore"] += [rf"re:{re.escape(name)}\..*" for name in sorted(unsplit)]
    if stock.turned:
        table[FIELD], matrices = make_transform_config(
            stock.turned, _inner_rotation(model).to(dtype)
        )
        table["quantization_status"] = STATUS
        tensors |= matrices
    _shorten(config, model, context)
    config.quantization_config = table  # pyright: ignore[reportAttributeAccessIssue]
    # compressed-tensors unpacks 4-bit floats to bfloat16, whatever the rest is.
    floats = any(isinstance(layer.grid, MxE2M1 | NvE2M1) for layer in layers.values())
    config.dtype = torch.bfloat16 if floats else dtype
    with create_folder(folder, card) as part:
        if isinstance(tokenizer, Tokenizer):
            write_texts(tokenizer, part, config, embedding_rows(model))
        else:
            tokenizer(part)
        write_config(config, part)
        write_tensors(tensors, part)
        read_back(part, model, tokenizer=read, rounding=_rounded(layers.values(), config.dtype))
    return config.model_type


def _shorten(config: PreTrainedConfig, model: nn.Module, context: int) -> None:
    """Write a shorter context into a configuration, where no table of learned positions has the
    length of the old one.
    """
    text: Any = config.get_text_config(decoder=True)
    model_context = getattr(text, "max_position_embeddings", None) or 0
    tables = (part for part in model.modules() if isinstance(part, nn.Embedding))
    if 0 < context < model_context and all(
        table.num_embeddings != model_context for table in tables
    ):
        text.max_position_embeddings = context


def file_bytes(folder: Path) -> int:
    """Return the size of a folder's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def state_bytes(model: nn.Module, stored: torch.dtype | None = None) -> int:
    """Return what a model's weights take, each counted once, before any file's own header.

    What is not quantized counts as it is written: in the type it was `stored` in, if exactly.
    """
    quantized, size = quantized_layers(model), 0
    for name, tensor in unique_state(model).items():
        owner, _, leaf = name.rpartition(".")
        of_layer = owner in quantized and leaf != "bias"  # numbers or scales, whose types are set
        size += narrow_exactly(tensor, None if of_layer else stored).nbytes
    return size


@contextmanager
def _rounded(layers: Iterable[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Let a quantized model compute for a while as readers of the format may, which unpack weights
    to `dtype`, and round inputs by other scales: here not at all, which changes as much.
    """
    quantized = {layer for layer in layers if isinstance(layer, QuantizedLinear)}
    try:
        for layer in quantized:
            layer.linear = partial(_unpacked, layer, dtype)
        with RoundedParameters(lambda weight: weight.to(dtype)):
            yield
    finally:
        for layer in quantized:
            del layer.linear


def _unpacked(layer: QuantizedLinear, dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return the product with a layer's weights in `dtype`."""
    rows = x.float() if layer.divisor is None else x.float() / layer.divisor
    bias = None if layer.bias is None else layer.bias.float()
    return F.linear(rows, layer.dequantized().to(dtype).float(), bias).to(x.dtype)


def _four_bit_floats(scheme: Scheme, weights: MxE2M1 | NvE2M1, inputs: Grid | None) -> str:
    """Return the name of the form of MXFP4 or NVFP4.

    Raises:
        WakefulError: the format lacks the scheme.
    """
    name = weights.name_of_format.lower()
    if inputs is not None and type(inputs) is not type(weights):
        allowed = f"{weights.name_of_format} weights with inputs of the same grid or as they are"
        raise _lacks(scheme, allowed, name)
    if weights.two_scales:
        if weights.per != "tensor" or (inputs is not None and inputs.per != "tensor"):
            raise _lacks(scheme, "NVFP4 whose t is per tensor", name)
        if inputs is not None and scheme.scales == "dynamic":
            again = f"{scheme.expression!r} --scales static"
            raise _lacks(scheme, "NVFP4 inputs whose t is static", again)
    return f"{name}-pack-quantized"


def _arguments(grid: Grid, *, dynamic: bool | str) -> dict[str, Any]:
    strategy = "tensor_group" if grid.two_scales else "group" if grid.group else grid.per
    arguments = {
        "num_bits": grid.bits,
        "type": "int" if isinstance(grid, Absmax | Zeropoint) else "float",
        "symmetric": grid.symmetric,
        "strategy": strategy,
        "group_size": grid.group or None,
        "dynamic": dynamic,
    }
    kind = _scale_type(grid)
    return arguments | ({"scale_dtype": str(kind)} if kind else {})


def _scale_type(grid: Grid) -> torch.dtype | None:
    """Return what scales of groups are stored as, where it is not the model's own type."""
    if isinstance(grid, MxE2M1):
        return torch.uint8
    return torch.float8_e4m3fn if isinstance(grid, NvE2M1) else None


@dataclass(frozen=True)
class _Stock:
    """A model as its stock architecture has it, by the names there."""

    config: PreTrainedConfig
    tensors: Mapping[str, Tensor]
    """Layers in full precision."""
    layers: dict[str, nn.Module]
    """Those that are, or are to be, quantized."""
    turned: Sequence[str] = ()
    """The names there of the layers that read rotated inputs."""
    caches: Mapping[str, QuantizedCache] = field(default_factory=dict)
    """Quantized caches, by the names there of the attention layers."""


@dataclass(frozen=True)
class _There:
    """Names of a model's layers in Transformers' modules and files."""

    linears: Mapping[str, tuple[int, int]]
    """The shape (N, K) of every `nn.Linear`."""
    places: Mapping[str, list[str]]
    """Names of weights and layers in files, if they differ; an expert's gate and up apart."""
    experts: Set[str]
    routers: list[str]


def _tensors(
    stock: _Stock, layers: Mapping[str, QuantizedLinear], there: _There, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return what the files hold, by name; in `dtype` where that changes no number."""
    tensors = {
        there.places.get(name, [name])[0]: tensor.detach() for name, tensor in stock.tensors.items()
    }
    for name, layer in layers.items():
        places = there.places.get(name, [name])
        rows = layer.out_features // len(places)
        for part, stacked in _stored(layer).items():
            for number, file_name in enumerate(places):
                piece = stacked if len(places) == 1 else stacked[number * rows :][:rows].clone()
                if part == "weight_shape":
                    piece = torch.tensor([rows, layer.in_features])
                tensors[f"{file_name}.{part}"] = store_like(layer.integers, piece)
    return {name: narrow_exactly(tensor, dtype) for name, tensor in tensors.items()}


def _cache_scales(caches: Mapping[str, QuantizedCache]) -> dict[str, Tensor]:
    """Return the scales of keys and values as the format has them."""
    return {
        f"{name}.{part[0]}_scale": cache.fixed_scales(part).scale.reshape(1)
        for name, cache in caches.items()
        for part in ("keys", "values")
    }


def _targets(schemes: Mapping[str, Scheme], there: _There) -> dict[Scheme, list[str]]:
    """Return the targets of each scheme beside "Linear", of layers by their names."""
    targets: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        targets.setdefault(scheme, []).append(name)
    if len(targets) == 1:
        # vLLM's output head is of no class named Linear, so that only its own name finds it.
        return {
            scheme: [name for name in names if "." not in name] for scheme, names in targets.items()
        }
    for scheme, names in targets.items():
        alone = [name for name in names if name not in there.experts]
        # Transformers looks for one group that a pattern of experts is in.
        targets[scheme] = alone + [_EXPERTS] * (len(alone) < len(names))
    return targets


def _checked(
    schemes: Mapping[str, Scheme], stock: _Stock, tokenizer: Tokenizer | None
) -> tuple[_There, Tokenizer | None]:
    """Return how Transformers has the model, and the tokenizer as it is read there; `schemes` are
    those of the layers to quantize, by their names there.

    Raises:
        WakefulError: a layer, or the tokenizer, has no place there.
    """
    kind, there = stock.config.model_type, _there(stock.config)
    of_experts = {schemes[name]: name for name in stock.layers if name in there.experts}
    if len(of_experts) > 1:
        raise WakefulError(
            f"{' and '.join(of_experts.values())} are experts of several schemes, and Transformers "
            f"reads all experts by one: {_OTHERWISE}"
        )
    widths: dict[str, int] = {}
    for name, layer in stock.layers.items():
        scheme = schemes[name]
        quantized = isinstance(layer, QuantizedLinear)
        shape = (layer.out_features, layer.in_features) if quantized else matrix(layer)[0].shape
        if name in there.experts:
            if scheme.inputs is not None or not isinstance(scheme.weights, Absmax):
                raise WakefulError(
                    f"{name} is an expert, which Transformers reads from {FORMAT} in whole numbers "
                    f"with inputs as they are alone: use --scheme w4a16, or {_OTHERWISE}"
                )
        elif there.linears.get(name) != tuple(shape):
            raise WakefulError(
                f"{FORMAT} holds what is an nn.Linear in Transformers, or an expert that its files "
                f"hold by itself, and {name} of a {kind} is neither: {_OTHERWISE}"
            )
        widths[name] = shape[1]
    for name in (tensor_name.removesuffix(".weight") for tensor_name in stock.tensors):
        if name in there.experts:
            raise WakefulError(
                f"{name} stays in full precision by itself, and {FORMAT} has one form for all "
                f"experts of a layer: --skip {name.rsplit('.', 2)[0]} leaves them, or {_OTHERWISE}"
            )
    for name, width in widths.items():
        scheme, grid = schemes[name], schemes[name].weights
        if grid is None or grid.divides(width):
            continue
        finer = ""
        if isinstance(grid, Absmax):  # others have groups of one length
            fits = math.gcd(*widths.values())
            fits = min(fits & -fits, 2 ** (grid.group.bit_length() - 1))  # powers of two
            finer = f"use --scheme {_expression(scheme, replace(grid, group=fits))!r}, or "
        raise WakefulError(
            f"{name} reads {width} channels, which are not whole groups of "
            f"{grid.group}, and {FORMAT} has no shorter group: {finer}{_OTHERWISE}"
        )
    read = None if tokenizer is None else readable_tokenizer(tokenizer, stock.config)
    if tokenizer is not None and read is None:
        raise WakefulError(
            f"Transformers reads another tokenizer beside a {kind} than this model's: {_OTHERWISE}"
        )
    return there, read


def _expression(scheme: Scheme, weights: Grid) -> str:
    """Return the expression of a scheme with another grid of weights."""
    regridded = Scheme(weights=weights, inputs=scheme.inputs, method=scheme.method)
    return regridded.with_scales(scheme.scales).expression


def _stock(model: nn.Module, quantized: Mapping[str, nn.Module]) -> _Stock:
    """Return a model as its stock architecture has it, with the layers `found` quantized."""
    parameters = dict[str, Tensor](model.named_parameters(remove_duplicate=False))
    parameters |= _divided(model)
    caches = {
        name: part for name, part in model.named_modules() if isinstance(part, QuantizedCache)
    }
    if as_decoder(model) is None:
        assert isinstance(model, PreTrainedModel)
        if attention_implementation(model) == SOFTMAX1:
            raise WakefulError(
                f"{FORMAT} has no place for softmax-1, by which this {type(model).__name__} "
                f"attends (attn_implementation = {SOFTMAX1!r}): {_OTHERWISE}"
            )
        config = corrected_config(model)
        # Persistent buffers too: a router's correction is one, and so is a scale of Gemma 4's.
        stored = parameters | {
            name: tensor for name, tensor in model.state_dict(keep_vars=True).items()
            if not isinstance(tensor, nn.Parameter)
        }  # fmt: skip
        stays = {
            name: tensor
            for name, tensor in stored.items()
            if name.rpartition(".")[0] not in quantized.keys() | caches.keys()
        }
        attentions = {name.rpartition(".")[0]: cache for name, cache in caches.items()}
        return _Stock(config, stays, dict(quantized), caches=attentions)
    assert isinstance(model, Decoder)
    parameters |= dict(model.named_buffers())  # softmax-1's constant
    plain = dataclasses.replace(model.config, mlp_rotation=False)  # a transform takes its place
    kind, config = stock_architecture(plain)
    if kind == WakefulConfig.model_type:
        raise WakefulError(
            f"{FORMAT} is for stock architectures, and this is our own class: {_OTHERWISE}; "
            "the cures --rotate hadamard, --rotate_inner and --sinks leave a stock one"
        )
    family = FAMILIES[kind]
    turned: list[str] = []
    attentions: dict[str, QuantizedCache] = {}
    layers: dict[str, nn.Module] = {}
    tensors: dict[str, Tensor] = {}
    for link in family.links(plain):
        hf_name = family.stored(link.hf_name)
        owners = [part.rpartition(".")[0] for part in link.own_names]
        for owner in owners:
            cache = caches.get(f"{owner.removesuffix('.key')}.quantized")
            if cache is not None and owner.endswith(".key"):
                attentions[hf_name.rsplit(".", 2)[0]] = cache
        if model.config.mlp_rotation and owners[0].endswith(".mlp.down"):
            if hf_name.endswith(".bias"):
                raise WakefulError(
                    f"{hf_name} is a bias of a layer whose inputs are rotated, which vLLM lacks: "
                    f"{_OTHERWISE}, or cure without --rotate_inner"
                )
            turned.append(hf_name.rpartition(".")[0])
        if not any(owner in quantized for owner in owners):
            tensors[hf_name] = link.join([parameters[part].detach() for part in link.own_names])
        elif len(owners) > 1:
            raise WakefulError(
                f"{FORMAT} has one grid a matrix, and {hf_name} of a {kind} holds several of ours: "
                f"{_OTHERWISE}"
            )
        else:
            layers[hf_name.rpartition(".")[0]] = quantized[owners[0]]
    return _Stock(config, tensors, layers, turned, attentions)


def _inner_rotation(model: nn.Module) -> Tensor:
    """Return M, by which x M is what `down` reads of the channels x."""
    down: Any = model.get_submodule("blocks.0.mlp.down")
    return WalshHadamard()(torch.eye(down.in_features, device=next(model.parameters()).device))


def _added(model: nn.Module) -> dict[str, float]:
    """Return by weight what norms add to theirs before they scale with it: 1 in a Gemma, mostly 0.

    A norm's output is linear in its weight w, n (w + c), so two weights tell c.
    """
    offsets: dict[str, float] = {}
    for name in readers_of_norms(model):
        norm = copy.deepcopy(model.get_submodule(name)).float()
        weight = norm.get_parameter("weight").requires_grad_(False)
        if getattr(norm, "bias", None) is not None:
            norm.get_parameter("bias").requires_grad_(False).zero_()
        x = torch.linspace(1, 2, len(weight), device=weight.device)[None, None]
        without, with_one = (norm(x + 0 * weight.fill_(value)).abs().sum() for value in (0.0, 1.0))
        offsets[f"{name}.weight"] = round(float(without / (with_one - without)), 3)
    return offsets


def _there(config: PreTrainedConfig) -> _There:
    """Return how Transformers has the stock model."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    modules = dict(skeleton.named_modules())
    linears = {
        name: (module.out_features, module.in_features)
        for name, module in modules.items()
        if isinstance(module, nn.Linear)
    }
    places: dict[str, list[str]] = {}
    experts: set[str] = set()
    if any(map(is_fused, modules.values())):
        names, numbered = list[str](), dict[str, Tensor]()
        for name, tensor in skeleton.state_dict().items():
            parts, numbers = [name], torch.tensor([len(names)])
            if tensor.ndim == 3 and is_fused(modules[name.rpartition(".")[0]]):
                halves = 2 if name.endswith("gate_up_proj") else 1
                parts = [f"{name}.{n}" for n in range(len(tensor)) for _ in range(halves)]
                numbers = torch.arange(len(names), len(names) + len(parts)).view(-1, halves, 1)
            names, numbered[name] = names + parts, numbers
        # Numbers in the place of weights tell where Transformers writes each.
        written = revert_weight_conversion(skeleton, numbered).items()
        alone = {int(index): file_name for file_name, index in written if index.numel() == 1}
        experts = {names[number] for number in alone} - numbered.keys()
        for number in sorted(alone):
            places.setdefault(names[number], []).append(alone[number])
        for name, file_names in [*places.items()]:
            layer = name.removesuffix(".weight")
            places[layer] = [index.removesuffix(".weight") for index in file_names]
    routers = routers_of(skeleton)
    routing = [places[name][0] for name, module in modules.items() if id(module) in routers]
    return _There(linears, places, experts, routing)


def _divided(model: nn.Module) -> dict[str, Tensor]:
    """Return each norm's scale (and shift) over what the layers that read it divide inputs by."""
    divided = {
        name: layer.divisor
        for name, layer in quantized_layers(model).items()
        if layer.divisor is not None and not bool((layer.divisor == 1).all())
    }
    if not divided:
        return {}
    added = _added(model) if as_decoder(model) is None else {}
    scales: dict[str, Tensor] = {}
    for norm, readers in readers_of_norms(model).items():
        here = [divided.pop(reader) for reader in readers if reader in divided]
        if not here:
            continue
        if len(here) < len(readers) or any(not torch.equal(divisor, here[0]) for divisor in here):
            raise _differ(readers)
        for part in ("weight", "bias"):
            stored = getattr(model.get_submodule(norm), part, None)
            if stored is not None:
                more = added.get(f"{norm}.{part}", 0.0)
                scale = (stored.detach().float() + more) / here[0] - more
                scales[f"{norm}.{part}"] = scale.to(stored.dtype)
    _refuse_divided(divided)
    return scales


def _differ(readers: Collection[str]) -> WakefulError:
    return WakefulError(
        f"{', '.join(readers)} read one norm and divide it differently: --skip all of them or "
        f"none, or {_OTHERWISE}"
    )


def _refuse_divided(layers: Collection[str]) -> None:
    if layers:
        raise WakefulError(
            f"{min(layers)} divides its inputs and no norm comes before it to do that: "
            "write method=smooth(norms=True)"
        )


def _stored(layer: QuantizedLinear) -> dict[str, Tensor]:
    """Return a layer's tensors as the format has them."""
    grid = layer.grid
    tensors = {} if layer.bias is None else {"bias": layer.bias}
    if isinstance(grid, MxE2M1 | NvE2M1):
        tensors["weight_packed"] = layer.integers
        tensors["weight_scale"] = layer.scale.view(_scale_type(grid) or grid.scale_type)
        for name, outer in (("weight", layer.outer), ("input", layer.input_scale)):
            if outer is not None:
                tensors[f"{name}_global_scale"] = outer.reshape(1).reciprocal()
        return tensors
    codes, scale = layer.operands.integers, layer.operands.scales.scale
    if grid.scale_type.itemsize > 1:
        scale = layer.scale
    tensors["weight_scale"] = scale.reshape(1) if grid.per == "tensor" else scale
    if layer.scheme.inputs is not None:
        kind = torch.float8_e4m3fn if isinstance(grid, E4M3) else torch.int8
        tensors["weight"] = codes.view(kind)
        if layer.input_scale is not None:
            tensors["input_scale"] = layer.input_scale.reshape(1)
    else:
        tensors["weight_packed"] = packed(codes, grid.bits)
        tensors["weight_shape"] = torch.tensor([layer.out_features, layer.in_features])
    return tensors


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return whole numbers (N, K) of 4 or 8 bits in words (N, ⌈K·bits/32⌉) of 32, the first lowest.

    2^(bits − 1) is added to each.
    """
    return torch.cat([_packed_words(part, bits) for part in split_rows(codes)])


def _packed_words(codes: Tensor, bits: int) -> Tensor:
    per_word = 32 // bits
    padded = F.pad(codes.long() + 2 ** (bits - 1), (0, -codes.shape[1] % per_word))
    shifts = torch.arange(per_word, device=codes.device) * bits
    packed = (padded.unflatten(1, (-1, per_word)) << shifts).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _lacks(scheme: Scheme, allowed: str, instead: str) -> WakefulError:
    return WakefulError(
        f"{scheme} cannot be saved as {FORMAT}, which stores only {allowed}; use --scheme "
        f"{instead}, or {_OTHERWISE}"
    )
