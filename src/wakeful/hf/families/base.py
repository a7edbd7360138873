"""Families of Transformers architectures: conversion of configurations, and names of tensors."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from wakeful.config.model import MLPName, ModelConfig
from wakeful.errors import WakefulError
from wakeful.normalizers import Softmax1
from wakeful.ropes import Linear, Llama3
from wakeful.variants import build

_WITHOUT_WINDOWS = ("llama", "olmo2")
"""Architectures whose code ignores a window that their configuration names."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Names in Transformers of a layer with full attention, and of one with a sliding window."""
Tensors = list[Tensor] | tuple[Tensor, ...]
Join = Callable[[Tensors], Tensor]
SplitFunction = Callable[[Tensor], Sequence[Tensor]]


def _unwrap_tensor(tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    return tensor


def _wrap_tensor(tensor: Tensor) -> Sequence[Tensor]:
    return (tensor,)


@dataclass(frozen=True)
class Link:
    """A tensor of a Transformers checkpoint, and the parameters of our decoder that it holds.

    `split` maps the tensor to the parameters, `join` is its inverse.
    """

    hf_name: str
    decoder_names: tuple[str, ...]
    split: SplitFunction = _wrap_tensor
    join: Join = _unwrap_tensor


def unchanged_links(hf_name: str, decoder_name: str, *parts: str) -> list[Link]:
    """Return a link for each of `parts` ("weight", "bias") of a module that is called `hf_name` in
    a Transformers checkpoint and `decoder_name` in our decoder, and has the same values in both.
    """
    return [Link(f"{hf_name}.{part}", (f"{decoder_name}.{part}",)) for part in parts]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of Transformers architectures that our decoder can be converted from and to.

    `from_hf_config(config, max_length)` converts a configuration of Transformers to ours, with a
    context of `max_length` tokens (0: the configuration's own); it raises an error for a field that
    our decoder cannot represent. `to_hf_config` converts ours to the nearest of the family, which
    is the same model only if `from_hf_config` converts it back to ours. `links` names every tensor
    of such a model, without the `prefix` that checkpoints put before the names of the body.
    """

    model_types: tuple[str, ...]
    """The `model_type`s of configurations that belong to the family."""
    prefix: str
    from_hf_config: Callable[[PreTrainedConfig, int], ModelConfig]
    to_hf_config: Callable[[ModelConfig], PreTrainedConfig]
    links: Callable[[ModelConfig], list[Link]]
    head: str = "lm_head.weight"
    aliases: tuple[tuple[str, str], ...] = ()
    """Older names of tensors in checkpoints, each with the name that links use."""
    ignored: str = r"(?!)"
    """A regular expression for the end of names of constants that old checkpoints store."""

    def checkpoint_name(self, link_name: str) -> str:
        """Return a tensor's full name in checkpoints, given its name in a link (`Link.hf_name`)."""
        return link_name if link_name == self.head else self.prefix + link_name

    def link_name(self, checkpoint_name: str) -> str:
        """Return a tensor's name in links, given its name in a checkpoint."""
        aliases = dict(self.aliases)
        return aliases.get(checkpoint_name, checkpoint_name.removeprefix(self.prefix))

    def ignores(self, checkpoint_name: str) -> bool:
        """Tell whether a checkpoint's tensor is a constant that the model computes itself."""
        return re.search(rf"(?:^|\.)(?:{self.ignored})$", checkpoint_name) is not None


COMMON_FIELDS = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "hidden_size": "width",
    "intermediate_size": "mlp_width",
    "tie_word_embeddings": "tied",
    "initializer_range": "init_std",
}
"""Names of fields in Transformers' configurations, and in `ModelConfig` for the same value."""
GELU: dict[str, MLPName] = {
    "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact",
}  # fmt: skip
"""Our feed-forward networks by the names of their functions."""
GELU_NAMES = {"gelu": "gelu_new", "gelu_exact": "gelu"}


def read_fields(config: PreTrainedConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Return fields of `ModelConfig` with their values in a Transformers configuration.

    `names` maps each field's name in Transformers to its name in `ModelConfig`.
    """
    return {our_name: getattr(config, hf_name) for hf_name, our_name in names.items()}


def transformers_fields(config: ModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Return fields of a Transformers configuration with their values in our `config`.

    `names` maps each field's name in Transformers to its name in `ModelConfig`. bos_token_id and
    eos_token_id are None, since `ModelConfig` has no special tokens.
    """
    fields = {hf_name: getattr(config, our_name) for hf_name, our_name in names.items()}
    return fields | {"bos_token_id": None, "eos_token_id": None}


def check_field(config: PreTrainedConfig, name: str, *allowed: object) -> None:
    """Check that a field of a Transformers configuration has a value that our decoder supports.

    Raises:
        WakefulError: its value is not one of `allowed`, or the configuration has no such field.
    """
    if not hasattr(config, name):
        raise WakefulError(f"the {config.model_type} configuration has no {name}")
    value = getattr(config, name)
    if value not in allowed:
        values = " or ".join(map(repr, allowed))
        raise unsupported(config, f"{name} = {value!r}, and only {values} can be represented")


def unsupported(config: PreTrainedConfig, problem: str) -> WakefulError:
    """Return the error for a Transformers configuration that our decoder cannot represent."""
    return WakefulError(
        f"our decoder cannot be this {config.model_type}: its configuration has {problem}"
    )


def read_rope(config: PreTrainedConfig, layer_type: str = "") -> tuple[float, str, float]:
    """Return the RoPE of a Transformers configuration: its base θ, the expression of its scaling
    in `ModelConfig.rope`, and the share of each head's channels that it rotates.

    `layer_type` ("full_attention" or "sliding_attention") selects one of several RoPEs, for a
    configuration that has one per type of layer.

    Raises:
        WakefulError: the scaling depends on the text's length, or is unknown.
    """
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    kind = parameters.get("rope_type", "default")
    match kind:
        case "default":
            rope = "plain"
        case "linear":
            rope = f"linear(factor={float(parameters['factor'])})"
        case "llama3":
            rope = (
                f"llama3(factor={float(parameters['factor'])}, "
                f"original_length={parameters['original_max_position_embeddings']}, "
                f"low={float(parameters['low_freq_factor'])}, "
                f"high={float(parameters['high_freq_factor'])})"
            )
        case _:
            supported = "'default', 'linear' or 'llama3'"
            problem = (
                f"rope_parameters.rope_type = {kind!r}, and only {supported} can be represented"
            )
            raise unsupported(config, problem)
    share = float(parameters.get("partial_rotary_factor", 1.0))
    return float(parameters["rope_theta"]), rope, share


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """Return Transformers' `rope_parameters` for our configuration's RoPE base and scaling."""
    scaling = build("ropes", config.rope)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    match scaling:
        case Linear():
            parameters |= {"rope_type": "linear", "factor": scaling.factor}
        case Llama3():
            parameters |= {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_length,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
            }
    return parameters


def canonical_config(config: ModelConfig) -> ModelConfig:
    """Return an equivalent configuration with every default written out: two configurations
    describe the same function if their canonical ones are equal.

    A constant sink (softmax-1) becomes a learned one, since a checkpoint stores the values of both.
    Local layers that have the same RoPE and window as the others are no longer listed as local.
    """
    normalizer = build("normalizers", config.normalizer)
    if isinstance(normalizer, Softmax1):
        normalizer = Softmax1(learned=True)
    rotary = config.positions == "rotary"
    shape = config.shape
    # A scaling of RoPE does not apply to local layers.
    rope_differs = config.rope != "plain" or config.local_theta != config.rope_theta
    local = config.local_layers if rope_differs or config.has_short_window else ()
    attention_bias = "qkv" if config.qkv_bias else "none"
    if config.out_bias:
        attention_bias = "all"
    return dataclasses.replace(
        config,
        num_kv_heads=shape.num_kv_heads,
        head_width=shape.head_width,
        attention_bias=attention_bias,
        # Built and turned back into text, an expression has every option.
        norm=str(build("norms", config.norm)),
        placement=str(build("placements", config.placement)),
        rope=str(build("ropes", config.rope)),
        embedding=str(build("embeddings", config.embedding)),
        rope_theta=config.rope_theta if rotary else 10_000.0,
        local_layers=local,
        local_theta=config.local_theta if local else 0.0,
        window=config.window if config.has_short_window else 0,
        normalizer=str(normalizer),
        query_scalar=config.query_scalar or shape.head_width,
        rotary_width=(config.rotary_width or shape.head_width) if rotary else 0,
        scale_residual_init=False,  # concerns a new model only
    )


def rotary_width(share: float, head_width: int) -> int:
    """Return how many of a head's channels RoPE rotates, as `ModelConfig.rotary_width` has it: 0
    stands for all of them.
    """
    rotated = int(head_width * share)
    return 0 if rotated == head_width else rotated


def choose_context(config: PreTrainedConfig, max_length: int) -> int:
    """Return the context length to build: `max_length` tokens, or for 0 the configuration's own.

    Raises:
        WakefulError: `max_length` exceeds the configuration's `max_position_embeddings`.
    """
    full = config.max_position_embeddings
    if max_length > full:
        raise WakefulError(
            f"max_length = {max_length} is longer than the model's context of {full}"
        )
    return max_length or full


def add_window(config: PreTrainedConfig, decoder_config: ModelConfig) -> ModelConfig:
    """Return `decoder_config` with the sliding window of a Transformers configuration.

    A window at least as long as the context hides nothing and is left out. In our decoder, all
    local layers have the window, and may have another RoPE than the other layers, never scaled.

    Raises:
        WakefulError: the layers with the window are not the same as those with a RoPE of their own,
            or their RoPE is scaled.
    """
    window = getattr(config, "sliding_window", None)
    if config.model_type in _WITHOUT_WINDOWS:  # the architecture's code ignores the field
        window = None
    # If no types of layers are listed (Mistral), every layer has the window.
    layer_types = getattr(config, "layer_types", None) or [SLIDING] * decoder_config.num_layers
    sliding = tuple(n for n, layer_type in enumerate(layer_types) if layer_type == SLIDING)
    if window is None or not sliding or window >= decoder_config.max_length:
        return decoder_config
    # If no layer has a RoPE of its own, the layers with the window become the local ones.
    if not decoder_config.local_layers and decoder_config.rope == "plain":
        decoder_config = dataclasses.replace(
            decoder_config, local_layers=sliding, local_theta=decoder_config.rope_theta
        )
    if decoder_config.local_layers != sliding:
        raise unsupported(
            config,
            f"sliding_window = {window}, shorter than its context of {decoder_config.max_length}, "
            "in layers whose positions are scaled or of two kinds; within "
            f"max_length={window} they agree",
        )
    return dataclasses.replace(decoder_config, window=window)


def window_fields(config: ModelConfig) -> dict[str, Any]:
    """Return Transformers' fields `sliding_window` and `layer_types` for our configuration."""
    layer_types = [SLIDING if n in config.local_layers else FULL for n in range(config.num_layers)]
    # Layers that are local only by their RoPE get a window of the whole context, which hides
    # nothing.
    window = config.window if config.has_short_window else config.max_length
    return {"sliding_window": window, "layer_types": layer_types}
