"""Weights in: a model of Transformers, in files, in a GGUF file or in memory, as our `Decoder`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.families import CANNOT, FAMILIES, Family
from wakeful.hf.softmax1 import NAME
from wakeful.hf.whole import Shards, first_line, read_config, read_floats, whole_model
from wakeful.implementations import is_before
from wakeful.model.decoder import Decoder
from wakeful.model.initialize import skeleton

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Fields in which configurations count experts."""


def decoder_of(model: nn.Module, name: str) -> Decoder:
    """Return a model of Transformers in memory as our decoder, which shares its weights.

    Raises:
        WakefulError: our decoder cannot be it (the field of its configuration is named), or not
            with the attention function that the model was given.
    """
    assert isinstance(model, PreTrainedModel)
    first = next(model.parameters())
    family, description = _described(model.config, 0)
    description = _attending(model, description)
    tensors = model.state_dict()
    return _filled(description, family, tensors, Path(name), first.dtype, first.device).eval()


def decoder_from_folder(
    folder: Path, *, max_length: int, dtype: torch.dtype | None, device: torch.device
) -> Decoder:
    """Return the model of a folder in Transformers' format, with safetensors, sharded or not."""
    config = read_config(folder)
    quantized = getattr(config, "quantization_config", None) or {"quant_method": "gguf"}
    if not isinstance(quantized, dict):
        raise WakefulError(f"{folder / 'config.json'}: quantization_config must be a table")
    if quantized.get("quant_method") != "gguf":  # a mark of where the weights came from
        raise WakefulError(
            "quantized checkpoints cannot be read, and the configuration has "
            f"quantization_config.quant_method = {quantized.get('quant_method')!r}"
        )
    family, description = _described(config, max_length)
    with Shards(folder) as tensors:
        return _filled(description, family, tensors, folder, dtype, device)


def decoder_from_gguf(
    path: Path, *, max_length: int, dtype: torch.dtype | None, device: torch.device
) -> Decoder:
    """Return the model of a GGUF file."""
    try:
        model = whole_model(path.parent, dtype=dtype or torch.float32, gguf=path.name)
    except WakefulError:
        raise
    except Exception as error:  # Transformers raises nothing narrower
        raise WakefulError(f"{path} cannot be read: {first_line(error)}") from None
    family, description = _described(model.config, max_length)
    return _filled(description, family, model.state_dict(), path, dtype, device)


def _described(config: PreTrainedConfig, max_length: int) -> tuple[Family, ModelConfig]:
    kind = config.model_type
    if kind not in FAMILIES:
        known = f"it can be {', '.join(sorted(FAMILIES))}"
        experts = any(getattr(config, name, None) for name in _EXPERTS)
        why = CANNOT.get(kind, "it is a mixture of experts" if experts else known)
        raise WakefulError(f"our decoder cannot be a {kind}: {why}")
    try:
        return FAMILIES[kind], FAMILIES[kind].describe(config, max_length)
    except WakefulError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise WakefulError(
            f"the configuration is not that of a {kind}: {first_line(error)}"
        ) from None


def _attending(model: PreTrainedModel, description: ModelConfig) -> ModelConfig:
    """Return the description with the normalizer of the attention function that a model calls."""
    name = model.config.get_text_config(decoder=True)._attn_implementation
    if model.config.model_type == WakefulConfig.model_type or name in (None, "eager"):
        return description
    if name == NAME:
        if description.normalizer != "softmax":
            raise WakefulError(
                f"our decoder cannot be a {model.config.model_type} with attn_implementation = "
                f"{NAME!r}: its own normalizer is {description.normalizer}; load it without that"
            )
        return dataclasses.replace(description, normalizer="softmax1")
    if is_before(name):
        raise WakefulError(
            f"our decoder cannot be a {type(model).__name__} that reads its keys and values on a "
            "quantized cache's grid: take the model before it was quantized"
        )
    function = AttentionInterface().get(name)
    if not getattr(function, "__module__", "").startswith("transformers."):
        raise WakefulError(
            f"our decoder cannot be a {type(model).__name__} with attn_implementation = {name!r}, "
            "which is not one of Transformers' own: set_attn_implementation('sdpa') gives the "
            "model the ordinary softmax"
        )
    return description


def _filled(
    description: ModelConfig,
    family: Family,
    tensors: Mapping[str, Tensor],
    place: Path,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Decoder:
    """Return a decoder that holds the tensors themselves: no weight is made and then replaced."""
    decoder = skeleton(description, len(tensors), place)
    links = {link.theirs: link for link in family.links(description)}
    stored = _stored(family, links.keys(), tensors, tied=description.tied)
    empty = dict(decoder.named_parameters())
    for name, link in links.items():
        tensor = read_floats(tensors, stored[name])
        expected = link.join([empty[ours] for ours in link.ours]).shape
        if tensor.shape != expected:
            raise WakefulError(
                f"the tensor {stored[name]} has shape {tuple(tensor.shape)}, and the configuration "
                f"makes it {tuple(expected)}"
            )
        for ours, part in zip(link.ours, link.split(tensor), strict=True):
            owner, _, key = ours.rpartition(".")
            ready = part.to(device=device, dtype=dtype).contiguous()
            setattr(decoder.get_submodule(owner), key, nn.Parameter(ready, requires_grad=False))
    if description.tied:
        decoder.head.weight = decoder.embed.weight
    missed = [name for name, parameter in decoder.named_parameters() if parameter.is_meta]
    assert not missed, missed
    return decoder.to(device)


def _stored(
    family: Family, wanted: Any, tensors: Mapping[str, Tensor], *, tied: bool
) -> dict[str, str]:
    """Return what each wanted tensor is called where it is stored."""
    stored: dict[str, str] = {}
    for name in tensors:
        known = family.name(name)
        if known in wanted:
            stored[known] = name
        elif not family.ignores(name) and not (tied and known == family.head):
            raise WakefulError(
                f"the checkpoint has a tensor {name}, and the configuration gives it no place"
            )
    missing = [name for name in wanted if name not in stored]
    if missing:
        first = missing[0] if missing[0] == family.head else family.prefix + missing[0]
        raise WakefulError(
            f"the checkpoint has no tensor {first}, nor {len(missing) - 1} others that the "
            "configuration needs: is a shard missing?"
            if len(missing) > 1
            else f"the checkpoint has no tensor {first}, which the configuration needs"
        )
    return stored
