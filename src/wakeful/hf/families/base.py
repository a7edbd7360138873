"""Families of architectures: conversion of configurations, and names of tensors."""

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


def _only(tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    return tensor


def _alone(tensor: Tensor) -> Sequence[Tensor]:
    return (tensor,)


@dataclass(frozen=True)
class Link:
    """A tensor of a Transformers checkpoint, and the parameters of our decoder that it holds.

    `split` maps the tensor to the parameters, `join` is its inverse.
    """

    hf_name: str
    own_names: tuple[str, ...]
    split: SplitFunction = _alone
    join: Join = _only


def unchanged_links(hf_name: str, own_name: str, *parts: str) -> list[Link]:
    """Return the links of a module's tensors (`weight`, `bias`) that are stored unchanged."""
    return [Link(f"{hf_name}.{part}", (f"{own_name}.{part}",)) for part in parts]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of architectures that our decoder can be converted from and to.

    `from_hf_config` converts a configuration of Transformers to ours, with a context of that many
    tokens (0: its own); it raises an error for what our decoder cannot represent. `to_hf_config`
    converts ours to the nearest of the family, which is the same model only if `from_hf_config`
    returns ours from it. `links` names every tensor of such a
    model, without the `prefix` that a model with a head puts before those of its body.
    """

    kinds: tuple[str, ...]
    """The `model_type`s that are read; the order of families is that in which a decoder tries them
    on."""
    prefix: str
    from_hf_config: Callable[[PreTrainedConfig, int], ModelConfig]
    to_hf_config: Callable[[ModelConfig], PreTrainedConfig]
    links: Callable[[ModelConfig], list[Link]]
    head: str = "lm_head.weight"
    aliases: tuple[tuple[str, str], ...] = ()
    """Older names of tensors, and what they are called now."""
    ignored: str = r"(?!)"
    """A regular expression for the end of names of constants that old checkpoints store."""

    def stored(self, name: str) -> str:
        """Return the name under which checkpoints hold a tensor that a link names."""
        return name if name == self.head else self.prefix + name

    def name(self, stored: str) -> str:
        """Return the name a link uses for a stored tensor."""
        return dict(self.aliases).get(stored, stored.removeprefix(self.prefix))

    def ignores(self, stored: str) -> bool:
        """Tell whether a stored tensor is a constant that the model computes itself."""
        return re.search(rf"(?:^|\.)(?:{self.ignored})$", stored) is not None


COMMON_FIELDS = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "hidden_size": "width",
    "intermediate_size": "mlp_width",
    "tie_word_embeddings": "tied",
    "initializer_range": "init_std",
}
"""Fields of Transformers and what they are called here, where their values are the same."""
GELU: dict[str, MLPName] = {
    "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact",
}  # fmt: skip
"""Our feed-forward networks by the names of their functions."""
GELU_NAMES = {"gelu": "gelu_new", "gelu_exact": "gelu"}


def read_fields(config: PreTrainedConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Return our fields that a configuration of Transformers has under other names."""
    return {own_name: getattr(config, hf_name) for hf_name, own_name in names.items()}


def transformers_fields(config: ModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a Transformers configuration that we have under other names.

    `names` maps theirs to ours; bos_token_id and eos_token_id are None.
    """
    fields = {hf_name: getattr(config, own_name) for hf_name, own_name in names.items()}
    return fields | {"bos_token_id": None, "eos_token_id": None}


def check_field(config: PreTrainedConfig, name: str, *allowed: object) -> None:
    """Check a field that our decoder has only some values for.

    Raises:
        WakefulError: it has another value, or no such field.
    """
    if not hasattr(config, name):
        raise WakefulError(f"the {config.model_type} configuration has no {name}")
    value = getattr(config, name)
    if value not in allowed:
        values = " or ".join(map(repr, allowed))
        raise unsupported(config, f"{name} = {value!r}, and only {values} can be represented")


def unsupported(config: PreTrainedConfig, problem: str) -> WakefulError:
    """Return the error for a configuration that has what our decoder cannot be."""
    return WakefulError(
        f"our decoder cannot be this {config.model_type}: its configuration has {problem}"
    )


def read_rope(config: PreTrainedConfig, kind_of_layer: str = "") -> tuple[float, str, float]:
    """Return RoPE's base, our name of its scaling, and the share of each head's channels it turns.

    Where the layers are of several kinds, `kind_of_layer` names the one that is meant.

    Raises:
        WakefulError: the scaling depends on the text's length, or is unknown.
    """
    parameters = config.rope_parameters[kind_of_layer] if kind_of_layer else config.rope_parameters
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
    """Return RoPE's parameters as Transformers writes them."""
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
    """Return the same model described in full, so that equal models have equal descriptions.

    A constant sink is a learned one that says so with its values; layers whose RoPE and window are
    those of all others are not local.
    """
    normalizer = build("normalizers", config.normalizer)
    if isinstance(normalizer, Softmax1):
        normalizer = Softmax1(learned=True)
    rotary = config.positions == "rotary"
    shape = config.shape
    differs = config.rope != "plain" or config.local_theta != config.rope_theta
    local = config.local_layers if differs or config.has_short_window else ()
    return dataclasses.replace(
        config,
        num_kv_heads=shape.num_kv_heads,
        head_width=shape.head_width,
        attention_bias="all" if config.out_bias else "qkv" if config.qkv_bias else "none",
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
        rotary_width=config.rotary_width or shape.head_width if rotary else 0,
        relaxed_prefix=config.relaxed_prefix if config.relaxed_prefix > 1 else 0,
        scale_residual_init=False,
    )


def rotary_width(share: float, head_width: int) -> int:
    """Return the channels that a share of a head is; 0 for all of them, as `ModelConfig` says."""
    turned = int(head_width * share)
    return 0 if turned == head_width else turned


def choose_context(config: PreTrainedConfig, max_length: int) -> int:
    """Return the context to build: `max_length` tokens, or the configuration's own where it is 0.

    Raises:
        WakefulError: that is longer than the model's own.
    """
    own = config.max_position_embeddings
    if max_length > own:
        raise WakefulError(f"max_length = {max_length} is longer than the model's context of {own}")
    return max_length or own


def add_window(config: PreTrainedConfig, decoder_config: ModelConfig) -> ModelConfig:
    """Return our description with the window of those layers that have one within the context.

    Raises:
        WakefulError: these layers are not those that have positions of their own.
    """
    window = getattr(config, "sliding_window", None)
    if config.model_type in _WITHOUT_WINDOWS:
        window = None
    kinds = getattr(config, "layer_types", None) or [SLIDING] * decoder_config.num_layers
    sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
    if window is None or not sliding or window >= decoder_config.max_length:
        return decoder_config
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
    """Return the fields of Transformers that say which layers have a window, and which."""
    kinds = [SLIDING if n in config.local_layers else FULL for n in range(config.num_layers)]
    window = config.window if config.has_short_window else config.max_length
    return {"sliding_window": window, "layer_types": kinds}
