"""Quantized models on disk: whole numbers and scales in safetensors, everything else in JSON.

quantized.json     format, scheme, scales, which layers, what the model is
model.safetensors  int8 or packed int4 weights, float32 scales, and the parameters that stayed
config.json        a Transformers model's architecture; for our decoder it is in quantized.json
tokenizer.json     and what else the tokenizer needs; how to generate, in generation_config.json
"""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from wakeful.config.schema import config_from_table
from wakeful.config.tables import to_table
from wakeful.device import choose_device, dtype_called
from wakeful.errors import WakefulError
from wakeful.guard import guarded
from wakeful.hf.read_back import read_back
from wakeful.hf.weights_out import read_generation
from wakeful.hf.whole import (
    Shards,
    attention_of,
    check_bounds,
    config_of,
    hushed,
    narrowed,
    read_config,
)
from wakeful.implementations import SOFTMAX1, implementation_of
from wakeful.model.decoder import Decoder
from wakeful.model.initialize import skeleton
from wakeful.probes.running import as_decoder
from wakeful.quant.arithmetic import Arithmetic
from wakeful.quant.cache import with_cache
from wakeful.quant.convert import exchanged, is_linear, prepared_as, quantized_layers, scheme_of
from wakeful.quant.linear import QuantizedLinear, empty
from wakeful.quant.schemes import ScaleKind, Scheme, parse_scheme
from wakeful.runs import checkpoint
from wakeful.runs.run import disk_errors, read_record, save_tensors
from wakeful.version import __version__

HEADER = "quantized.json"
WEIGHTS = "model.safetensors"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Header:
    """What quantized.json says."""

    format: int
    wakeful: str = ""
    """The version that wrote it."""
    name: str
    kind: Literal["decoder", "transformers"]
    model: Mapping[str, Any] | None = None
    """The decoder's description, where it is one."""
    attention: Literal["", "wakeful_softmax1"] = ""
    """A model of Transformers' attention function, where it is ours."""
    scheme: str
    scales: ScaleKind
    dtype: Literal["float32", "float64", "bfloat16", "float16"]
    """Of what stayed, when it was saved."""
    context: int
    bos: int | None = None
    layers: tuple[str, ...]
    """The names of those that are quantized."""
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The scheme, and its kind of scales, of layers that have another."""

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise WakefulError(f"has format {self.format}; this wakeful reads {FORMAT}")
        if self.kind == "decoder" and self.model is None:
            raise WakefulError("model is missing, which describes the decoder")
        if not all(each[1:] in (("dynamic",), ("static",)) for each in self.others.values()):
            raise WakefulError("others must be layers with a scheme and its scales each")

    @property
    def quantized_as(self) -> Scheme:
        """The scheme of most layers."""
        return parse_scheme(self.scheme, self.scales)


class QuantizedConfig(PreTrainedConfig):
    """The configuration of a quantized model of Transformers, that of the model inside it.

    Transformers alone makes up weights that it does not find and only warns, also where it does not
    know a quantization method: an architecture that it does not know is what it refuses.
    """

    model_type = "wakeful_quantized"

    def __init__(self, *, inner: dict[str, Any] | None = None, **others: Any) -> None:
        self.inner = dict(inner or {})
        super().__init__(**others)

    def whole(self, folder: Path) -> PreTrainedConfig:
        """Return the configuration of the model inside."""
        with guarded(f"{folder / 'config.json'}: inner is damaged"):
            return AutoConfig.for_model(**self.inner)


class QuantizedForCausalLM:
    """What `AutoModelForCausalLM` loads a quantized folder by, once this package is imported."""

    config_class = QuantizedConfig

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *_: Any, device_map: Any = None,
        dtype: torch.dtype | str | None = None, **others: Any,
    ) -> nn.Module:  # fmt: skip
        """Return the model that `save_quantized` wrote, on the one device that `device_map` names;
        "auto" is a GPU where there is one. `dtype` is of what stayed; without it, as saved.
        """
        device = choose_device(str(device_map or "cpu"), field="device_map")
        kind = dtype_called(dtype or others.get("torch_dtype") or "auto")
        return load_quantized(Path(folder), device=device, dtype=kind)[0]


def is_quantized_folder(path: Path) -> bool:
    """Whether a folder holds what `save_quantized` wrote."""
    return os.path.isfile(path / HEADER)  # which a name too long is not


def save_quantized(
    model: nn.Module,
    folder: Path,
    *,
    name: str,
    context: int,
    bos: int | None,
    stored: torch.dtype | None = None,
) -> None:
    """Write a quantized model into `folder`, which exists; the tokenizer is the caller's.

    What stayed is written in the type it was `stored` in before, where that is exact. It is read
    back before it has its name.

    Raises:
        WakefulError: it cannot be written, or not be read back.
    """
    scheme = scheme_of(model)
    if scheme is None:
        raise WakefulError("the model is not quantized: nothing to save")
    decoder, layers = as_decoder(model), quantized_layers(model)
    # Transformers records no attention function.
    softmax1 = isinstance(model, PreTrainedModel) and implementation_of(model) == SOFTMAX1
    header = Header(
        format=FORMAT, wakeful=__version__, name=name,
        kind="transformers" if decoder is None else "decoder",
        model=None if decoder is None else to_table(decoder.config),
        attention=SOFTMAX1 if softmax1 else "", scheme=scheme.definition, scales=scheme.scales,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),  # pyright: ignore[reportArgumentType]
        context=context, bos=bos, layers=tuple(layers),
        others={name: (each.scheme.definition, each.scheme.scales)
                for name, each in layers.items() if each.scheme != scheme},
    )  # fmt: skip
    if isinstance(model, PreTrainedModel):
        QuantizedConfig(inner=config_of(model).to_dict()).save_pretrained(folder)
    with disk_errors(folder):
        save_tensors(_tensors(model, stored), folder / WEIGHTS, {"format": "pt"})
        (folder / HEADER).write_text(json.dumps(to_table(header), indent=2) + "\n", "utf-8")
    read_back(folder, model, load=_on_processor)


def _on_processor(folder: Path) -> nn.Module:
    return load_quantized(folder, device=torch.device("cpu"))[0]


def load_quantized(
    folder: Path, *, device: torch.device, arithmetic: Arithmetic = "integer",
    dtype: torch.dtype | None = None,
) -> tuple[nn.Module, Header]:  # fmt: skip
    """Return the model of a folder, in evaluation mode, and its header; `dtype` is of what stayed,
    None as saved.

    Only JSON and safetensors are read, and every tensor's name, shape and type is checked.

    Raises:
        WakefulError: a file is missing or damaged, or does not fit the others.
    """
    header = read_header(folder)
    scheme = header.quantized_as
    others = {name: parse_scheme(*each) for name, each in header.others.items()}  # pyright: ignore[reportArgumentType]
    if bool(header.layers) != (scheme.weights is not None):
        raise WakefulError(f"{folder / HEADER}: layers do not go with the scheme {scheme}")
    with Shards(folder) as tensors:
        made = converted(_architecture(header, tensors), getattr(torch, header.dtype))
        model = prepared_as(made, header.layers)
        modules = dict(model.named_modules())
        replaced: dict[int, QuantizedLinear] = {}
        for name in header.layers:
            layer = modules.get(name)
            if layer is None or not is_linear(layer):
                raise WakefulError(f"{folder / HEADER}: the model has no linear layer {name!r}")
            replaced[id(layer)] = empty(layer, others.get(name, scheme), arithmetic)
        model = with_cache(exchanged(model, replaced), scheme)
        _fill(model, tensors)
    _check_codes(model, folder)
    if isinstance(model, PreTrainedModel):
        model.generation_config = read_generation(folder) or model.generation_config
    model.to(device)  # pyright: ignore[reportArgumentType]
    model = model if dtype is None else converted(model, dtype)
    return model.eval().requires_grad_(False), header


def converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give parameters and stored buffers a type, in place; return the model.

    What is computed and not stored, RoPE's frequencies above all, stays as exact as it was made:
    Transformers itself never rounds it.
    """
    made = [
        (module, name, module._buffers[name])
        for module in model.modules()
        for name in module._non_persistent_buffers_set
    ]
    model.to(dtype)
    for module, name, buffer in made:
        module._buffers[name] = buffer
    return model


def read_header(folder: Path) -> Header:
    """Return what quantized.json says, checked."""
    return read_record(Header, folder / HEADER)


def file_bytes(folder: Path) -> int:
    """Return the size of a folder's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def state_bytes(model: nn.Module, stored: torch.dtype | None = None) -> int:
    """Return what a model's weights take, each counted once, before any file's own header.

    What is not quantized counts as it is written: in the type it was `stored` in, if exactly.
    """
    return sum(tensor.nbytes for tensor in _tensors(model, stored).values())


def _tensors(model: nn.Module, stored: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the state by name, a shared tensor under its first name only."""
    quantized = quantized_layers(model)
    return {
        name: narrowed(tensor, None if _is_of(name, quantized) else stored).contiguous()
        for name, tensor in checkpoint.unique_state(model).items()
    }


def _is_of(name: str, quantized: Collection[str]) -> bool:
    """Whether a tensor is one of a quantized layer's numbers or scales, whose types are set."""
    owner, _, leaf = name.rpartition(".")
    return owner in quantized and leaf != "bias"


def _architecture(header: Header, tensors: Shards) -> nn.Module:
    folder, size = tensors.folder, tensors.num_bytes
    if header.kind == "decoder":
        config = config_from_table({"model": header.model, "train": {"length": 1}}).model
        numbers = skeleton(config, len(tensors), folder).num_parameters()["total"]
        if numbers > 2 * size:  # no scheme takes less than half a byte for one
            raise WakefulError(
                f"{folder / HEADER} describes {numbers:,} weights, and {WEIGHTS} has {size:,} bytes"
            )
        return Decoder(config)
    config = read_config(folder)
    if isinstance(config, QuantizedConfig):
        config = config.whole(folder)
    with hushed():
        check_bounds(config, tensors)
        return AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, header.dtype), trust_remote_code=False,
            attn_implementation=header.attention or attention_of(config),
        )  # fmt: skip


@torch.no_grad()
def _fill(model: nn.Module, tensors: Shards) -> None:
    """Copy a folder's tensors into the model after checking that each fits."""
    path, names, wanted = tensors.folder / WEIGHTS, set(tensors), _tensors(model)
    state = model.state_dict(keep_vars=True)
    quantized = quantized_layers(model)
    missing, unknown = sorted(set(wanted) - names), sorted(names - set(wanted))
    if missing or unknown:
        what = f"no {missing[0]!r}" if missing else f"an unknown {unknown[0]!r}"
        raise WakefulError(f"{path} has {what}: it does not belong to this {HEADER}")
    for name in sorted(names):
        tensor, place = tensors[name], state[name]
        of_layer = _is_of(name, quantized)
        if not of_layer:
            tensor, place.data = _wider(tensor, place.data)
        found, expected = (
            (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in (tensor, place)
        )
        if found != expected:
            raise WakefulError(
                f"{path}: {name} is {found[1]} {found[0]}, and the model needs "
                f"{expected[1]} {expected[0]}"
            )
        _check_values(path, name, tensor, scales=of_layer)
        place.copy_(tensor)


def _wider(tensor: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Return a stored tensor and its place in the wider type of the two, where one holds the other:
    what stayed is stored as narrow as is exact, and some models keep a few parameters in float32
    where the others have fewer bits.
    """
    floats = all(each.is_floating_point() and each.dtype.itemsize > 1 for each in (tensor, place))
    if floats:
        kind = torch.promote_types(tensor.dtype, place.dtype)
        if kind in (tensor.dtype, place.dtype):
            return tensor.to(kind), place.to(kind)
    return tensor, place


def _check_values(path: Path, name: str, tensor: Tensor, *, scales: bool) -> None:
    """Raise `WakefulError` for what no model has; `scales` says whether a scale is one of a grid,
    which a norm's γ is not.
    """
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise WakefulError(f"{path} is damaged: {name} has a NaN or an infinity")
    of_grid = scales and name.rpartition(".")[2] in QuantizedLinear.kept
    if of_grid and not (tensor > 0).all():
        raise WakefulError(f"{path} is damaged: {name} has a scale that is not positive")


def _check_codes(model: nn.Module, folder: Path) -> None:
    """Raise `WakefulError` where a code of a floating point format stands for no number."""
    for name, layer in quantized_layers(model).items():
        if layer.grid.emulated:
            scales = layer.operands.scales.scale
            if not (scales > 0).all() or not torch.isfinite(layer.dequantized()).all():
                raise WakefulError(f"{folder} is damaged: {name} has a code that is not a number")
