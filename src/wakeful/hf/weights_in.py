"""Weights in: a model of Transformers, in files, in a GGUF file or in memory, as our `Decoder`."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError, first_line
from wakeful.hf.checkpoint_reader import (
    UNPACKED,
    Shards,
    is_hybrid,
    quantization_method,
    read_config,
    read_floats,
    shares_head,
)
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.families import CANNOT, FAMILIES, Family
from wakeful.hf.gguf_in import gguf_tensors, read_gguf_config
from wakeful.hf.weights_out import stock_architecture
from wakeful.model.decoder import Decoder
from wakeful.model.initialize import build_on_meta
from wakeful.probes.running import is_quantized, refuse_adapters
from wakeful.variants.implementations import SOFTMAX1

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Fields in which configurations count experts."""


def convert_hf_model(model: nn.Module, max_length: int = 0) -> Decoder:
    """Return a model of Transformers as our decoder, which shares its weights.

    Whether the two are the same function, `agreement` finds. A `max_length` that is not 0 is the
    decoder's context.

    Raises:
        WakefulError: our decoder cannot be it (the field of its configuration is named), or not
            with the attention function that the model was given.
    """
    assert isinstance(model, PreTrainedModel)
    refuse_adapters(model)
    if is_quantized(model):
        raise WakefulError(
            f"our decoder cannot be a {type(model).__name__} whose layers or cache are quantized: "
            "take the model before it was quantized"
        )
    first = next(model.parameters())
    family, description = convert_hf_config(model.config, max_length)
    description = _attending(model, description)
    if description.tied or model.get_output_embeddings() is not None:
        description = dataclasses.replace(description, tied=shares_head(model))
    path = Path(type(model).__name__)
    tensors = model.state_dict()
    return _fill_decoder(description, family, tensors, path, first.dtype, first.device).eval()


def read_exported_decoder(
    folder: Path, *, max_length: int, dtype: torch.dtype | None, device: torch.device
) -> Decoder:
    """Return the model of an exported folder of our own class."""
    family, description = convert_hf_config(read_config(folder), max_length)
    with Shards(folder) as tensors:
        return _fill_decoder(description, family, tensors, folder, dtype, device)


def read_gguf_decoder(
    path: Path, *, max_length: int, dtype: torch.dtype | None, device: torch.device
) -> Decoder:
    """Return the model of a GGUF file that wakeful wrote."""
    own = read_gguf_config(path)
    assert own is not None
    family, description = convert_hf_config(stock_architecture(own)[1], max_length)
    return _fill_decoder(description, family, gguf_tensors(path, own), path, dtype, device)


def convert_hf_config(config: PreTrainedConfig, max_length: int = 0) -> tuple[Family, ModelConfig]:
    """Return a configuration's family and what our decoder is called to be by it.

    Raises:
        WakefulError: our decoder cannot be it, or its weights are quantized.
    """
    method = quantization_method(config)
    if method not in ("", *UNPACKED):
        raise WakefulError(
            "quantized checkpoints cannot be read, and the configuration has "
            f"quantization_config.quant_method = {method!r}"
        )
    kind = config.model_type
    if kind not in FAMILIES:
        why = CANNOT.get(kind, f"it can be {', '.join(sorted(FAMILIES))}")
        as_it_is = "diagnose and quantize take it as it is"
        if is_hybrid(config):
            why = f"it has layers of linear attention (layer_types); {as_it_is}"
        elif any(getattr(config, name, None) for name in _EXPERTS):
            why = f"it is a mixture of experts; {as_it_is}"
        raise WakefulError(f"our decoder cannot be a {kind}: {why}")
    try:
        return FAMILIES[kind], FAMILIES[kind].from_hf_config(config, max_length)
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
    if name == SOFTMAX1:
        if description.normalizer != "softmax":
            raise WakefulError(
                f"our decoder cannot be a {model.config.model_type} with attn_implementation = "
                f"{SOFTMAX1!r}: its own normalizer is {description.normalizer}; load it without "
                "that"
            )
        return dataclasses.replace(description, normalizer="softmax1")
    function = AttentionInterface().get(name)
    if not getattr(function, "__module__", "").startswith("transformers."):
        raise WakefulError(
            f"our decoder cannot be a {type(model).__name__} with attn_implementation = {name!r}, "
            "which is not one of Transformers' own: set_attn_implementation('sdpa') gives the "
            "model the ordinary softmax"
        )
    return description


def _fill_decoder(
    description: ModelConfig,
    family: Family,
    tensors: Mapping[str, Tensor],
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Decoder:
    """Return a decoder that holds the tensors themselves: no weight is made and then replaced."""
    decoder = build_on_meta(description, len(tensors), path)
    links = {link.hf_name: link for link in family.links(description)}
    stored = _stored_names(family, links.keys(), tensors, tied=description.tied)
    empty = dict(decoder.named_parameters())
    for name, link in links.items():
        tensor = read_floats(tensors, stored[name]).to(dtype=dtype)
        expected = link.join([empty[own_name] for own_name in link.own_names]).shape
        if tensor.shape != expected:
            raise WakefulError(
                f"the tensor {stored[name]} has shape {tuple(tensor.shape)}, and the configuration "
                f"makes it {tuple(expected)}"
            )
        for own_name, part in zip(link.own_names, link.split(tensor), strict=True):
            owner, _, key = own_name.rpartition(".")
            # A part that `split` widened stays so: Gemma's norms, stored less one.
            ready = part.to(device=device).contiguous()
            setattr(decoder.get_submodule(owner), key, nn.Parameter(ready, requires_grad=False))
    if description.tied:
        decoder.head.weight = decoder.embed.weight
    missed = [name for name, parameter in decoder.named_parameters() if parameter.is_meta]
    assert not missed, missed
    return decoder.to(device)


def _stored_names(
    family: Family, shapes: Any, tensors: Mapping[str, Tensor], *, tied: bool
) -> dict[str, str]:
    """Return what each wanted tensor is called where it is stored."""
    stored: dict[str, str] = {}
    for name in tensors:
        own_name = family.name(name)
        if own_name in shapes:
            stored[own_name] = name
        elif not family.ignores(name) and not (tied and own_name == family.head):
            raise WakefulError(
                f"the checkpoint has a tensor {name}, and the configuration gives it no place"
            )
    missing = [name for name in shapes if name not in stored]
    if missing:
        first = family.stored(missing[0])
        raise WakefulError(
            f"the checkpoint has no tensor {first}, nor {len(missing) - 1} others that the "
            "configuration needs: is a shard missing?"
            if len(missing) > 1
            else f"the checkpoint has no tensor {first}, which the configuration needs"
        )
    return stored
