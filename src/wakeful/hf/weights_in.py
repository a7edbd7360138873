"""Weights in: a model of Transformers, in files, in a GGUF file or in memory, as our `Decoder`."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path

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

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Fields in which configurations count experts."""


def convert_hf_model(model: nn.Module, max_length: int = 0) -> Decoder:
    """Convert a Transformers model to our decoder, which shares its weights and is in evaluation
    mode.

    `max_length`, if not 0, is the decoder's context. The logits of the two are not compared here
    (`compare_logits`).

    Raises:
        WakefulError: the model has adapters or quantized layers; or our decoder cannot represent it
            (the field of its configuration is named) or the attention function that it was given.
    """
    assert isinstance(model, PreTrainedModel)
    refuse_adapters(model)
    if is_quantized(model):
        raise WakefulError(
            f"our decoder cannot be a {type(model).__name__} whose layers or cache are quantized: "
            "take the model before it was quantized"
        )
    family, config = convert_hf_config(model.config, max_length)
    config = _set_attention_normalizer(model, config)
    # A model that was changed in memory may tie its head otherwise than its configuration says.
    if config.tied or model.get_output_embeddings() is not None:
        config = dataclasses.replace(config, tied=shares_head(model))
    first = next(model.parameters())
    name_in_errors = Path(type(model).__name__)
    decoder = _fill_decoder(
        config, family, model.state_dict(), name_in_errors, first.dtype, first.device
    )
    return decoder.eval()


def read_exported_decoder(
    folder: Path, *, max_length: int, dtype: torch.dtype | None, device: torch.device
) -> Decoder:
    """Load the decoder from a folder that was exported as our own Transformers class.

    `max_length` 0 keeps the model's context, and `dtype` None the stored types.

    Raises:
        WakefulError: the configuration or a file of weights is damaged, or a tensor is missing,
            unexpected or of another shape than the configuration's.
    """
    family, config = convert_hf_config(read_config(folder), max_length)
    with Shards(folder) as tensors:
        return _fill_decoder(config, family, tensors, folder, dtype, device)


def read_gguf_decoder(
    path: Path, *, max_length: int, dtype: torch.dtype | None, device: torch.device
) -> Decoder:
    """Load the decoder from a GGUF file that wakeful wrote.

    `max_length` 0 keeps the model's context, and `dtype` None gives float32.

    Raises:
        WakefulError: the file is damaged, or a tensor is missing, unexpected or of another shape
            than the stored configuration's.
    """
    stored_config = read_gguf_config(path)
    assert stored_config is not None  # None: another program wrote the file
    family, config = convert_hf_config(stock_architecture(stored_config)[1], max_length)
    tensors = gguf_tensors(path, stored_config)
    return _fill_decoder(config, family, tensors, path, dtype, device)


def convert_hf_config(config: PreTrainedConfig, max_length: int = 0) -> tuple[Family, ModelConfig]:
    """Convert a Transformers configuration to ours; return its family of architectures and our
    configuration, with a context of `max_length` tokens (0: the model's own).

    Raises:
        WakefulError: our decoder cannot represent the model, or its weights are quantized.
    """
    method = quantization_method(config)
    if method not in ("", *UNPACKED):
        raise WakefulError(
            "quantized checkpoints cannot be read, and the configuration has "
            f"quantization_config.quant_method = {method!r}"
        )
    model_type = config.model_type
    if model_type not in FAMILIES:
        why = CANNOT.get(model_type, f"it can be {', '.join(sorted(FAMILIES))}")
        as_it_is = "diagnose and quantize take it as it is"
        if is_hybrid(config):
            why = f"it has layers of linear attention (layer_types); {as_it_is}"
        elif any(getattr(config, name, None) for name in _EXPERT_COUNTS):
            why = f"it is a mixture of experts; {as_it_is}"
        raise WakefulError(f"our decoder cannot be a {model_type}: {why}")
    family = FAMILIES[model_type]
    try:
        return family, family.from_hf_config(config, max_length)
    except WakefulError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        # A damaged configuration: a field is missing, or has a value of another type.
        raise WakefulError(
            f"the configuration is not that of a {model_type}: {first_line(error)}"
        ) from None


def _set_attention_normalizer(model: PreTrainedModel, config: ModelConfig) -> ModelConfig:
    """Return our configuration with the normalizer (the function from attention logits to weights)
    that the model's `attn_implementation` computes.

    It is softmax-1 for `SOFTMAX1`. An implementation of Transformers' own computes the normalizer
    that `config` has already.

    Raises:
        WakefulError: the implementation is neither of the two, or `SOFTMAX1` would replace another
            normalizer than softmax.
    """
    name = model.config.get_text_config(decoder=True)._attn_implementation
    # Our own class ignores the setting, and "eager" is the architecture's own definition.
    if model.config.model_type == WakefulConfig.model_type or name in (None, "eager"):
        return config
    if name == SOFTMAX1:
        if config.normalizer != "softmax":
            raise WakefulError(
                f"our decoder cannot be a {model.config.model_type} with attn_implementation = "
                f"{SOFTMAX1!r}: its own normalizer is {config.normalizer}; load it without that"
            )
        return dataclasses.replace(config, normalizer="softmax1")
    function = AttentionInterface().get(name)
    if not getattr(function, "__module__", "").startswith("transformers."):
        raise WakefulError(
            f"our decoder cannot be a {type(model).__name__} with attn_implementation = {name!r}, "
            "which is not one of Transformers' own: set_attn_implementation('sdpa') gives the "
            "model the ordinary softmax"
        )
    return config


def _fill_decoder(
    config: ModelConfig,
    family: Family,
    tensors: Mapping[str, Tensor],
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Decoder:
    """Build a decoder on the meta device, which takes no memory, and set its parameters to a
    checkpoint's tensors, on `device`.

    `tensors` have their names in checkpoints of `family`. With `dtype` None they keep their types.
    `path` names the checkpoint in errors.

    Raises:
        WakefulError: a tensor is missing, unexpected, or of another shape than the configuration's.
    """
    decoder = build_on_meta(config, len(tensors), path)
    links = {link.hf_name: link for link in family.links(config)}
    checkpoint_names = _match_names(family, links.keys(), tensors, tied=config.tied)
    parameters = dict(decoder.named_parameters())
    for name, link in links.items():
        tensor = read_floats(tensors, checkpoint_names[name]).to(dtype=dtype)
        # The decoder's tensors have no values yet: joined, they have the shape of the checkpoint's.
        expected_shape = link.join([parameters[part] for part in link.decoder_names]).shape
        if tensor.shape != expected_shape:
            raise WakefulError(
                f"the tensor {checkpoint_names[name]} has shape {tuple(tensor.shape)}, and the "
                f"configuration makes it {tuple(expected_shape)}"
            )
        for decoder_name, part in zip(link.decoder_names, link.split(tensor), strict=True):
            owner, _, key = decoder_name.rpartition(".")
            # A part that `split` widened keeps its type: Gemma's norms, stored minus one.
            values = part.to(device=device).contiguous()
            setattr(decoder.get_submodule(owner), key, nn.Parameter(values, requires_grad=False))
    if config.tied:
        decoder.head.weight = decoder.embed.weight
    unset = [name for name, parameter in decoder.named_parameters() if parameter.is_meta]
    assert not unset, unset
    return decoder.to(device)  # only buffers move


def _match_names(
    family: Family, link_names: Collection[str], tensors: Mapping[str, Tensor], *, tied: bool
) -> dict[str, str]:
    """Map each of `link_names`, the tensors that a model needs as links name them (`Link.hf_name`),
    to the name that this tensor has in the checkpoint.

    Checkpoints may put a prefix before a name, or have an older name. They may also have constants
    that the model computes itself, and the head of a `tied` model, which is not read.

    Raises:
        WakefulError: the checkpoint lacks one of the tensors, or has another one.
    """
    checkpoint_names: dict[str, str] = {}
    for checkpoint_name in tensors:
        link_name = family.link_name(checkpoint_name)
        if link_name in link_names:
            checkpoint_names[link_name] = checkpoint_name
        elif not family.ignores(checkpoint_name) and not (tied and link_name == family.head):
            raise WakefulError(
                f"the checkpoint has a tensor {checkpoint_name}, and the configuration gives it no "
                "place"
            )
    missing = [name for name in link_names if name not in checkpoint_names]
    if missing:
        problem = f"the checkpoint has no tensor {family.checkpoint_name(missing[0])}"
        if len(missing) == 1:
            raise WakefulError(f"{problem}, which the configuration needs")
        raise WakefulError(
            f"{problem}, nor {len(missing) - 1} others that the configuration needs: is a shard "
            "missing?"
        )
    return checkpoint_names
