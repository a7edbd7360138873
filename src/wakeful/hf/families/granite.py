"""Granite: a Llama with multipliers; Granite SWA has sinks, and a window or no positions a layer.

A sink a head is softmax-1's e^s (`wakeful.normalizers.softmax1`), stored as `sinks`: zeros are the
constant 1.
"""

import dataclasses
import math
from typing import Any

import transformers
from transformers import GraniteConfig, PreTrainedConfig

from wakeful.config.model import ModelConfig
from wakeful.hf.families import llama
from wakeful.hf.families.base import (
    SLIDING,
    Link,
    add_window,
    check_field,
    unsupported,
    window_fields,
)
from wakeful.normalizers import Softmax1
from wakeful.variants import build

SINKS = "self_attn.sinks"
SWA: type[Any] | None = getattr(transformers, "GraniteSWAConfig", None)
"""None before Transformers 5.15, with which sinks are written as our own class."""


def from_hf_config(config: PreTrainedConfig, max_length: int) -> ModelConfig:
    """Return our configuration of a Granite, or of one with sinks."""
    c: Any = config
    check_field(config, "hidden_act", "silu", "swish")
    check_field(config, "residual_multiplier", 1.0)
    check_field(config, "logits_scaling", 1.0)
    root = math.sqrt(c.hidden_size)
    check_field(config, "embedding_multiplier", 1.0, root)
    divisor = round(c.attention_multiplier**-2)
    if divisor**-0.5 != c.attention_multiplier:
        problem = f"attention_multiplier = {c.attention_multiplier}"
        raise unsupported(config, f"{problem}, which is not one over the root of a whole number")
    plain = llama.shared_config(config, max_length)
    decoder_config = dataclasses.replace(
        plain,
        bias=bool(c.mlp_bias),
        query_scalar=divisor,
        embedding="plain" if c.embedding_multiplier == 1 else "scaled",
    )
    return decoder_config if c.model_type == "granite" else _with_sinks(config, decoder_config)


def _with_sinks(config: PreTrainedConfig, decoder_config: ModelConfig) -> ModelConfig:
    c: Any = config
    bases = [float(theta) for theta in c.layer_rope_theta]
    local = [n for n, kind in enumerate(c.layer_types) if kind == SLIDING]
    if not local or c.sliding_window is None or c.sliding_window >= decoder_config.max_length:
        local = [n for n, theta in enumerate(bases) if theta == min(bases) < max(bases)]
    usual = {theta for n, theta in enumerate(bases) if n not in local} or {
        decoder_config.rope_theta
    }
    near = {bases[n] for n in local} or {0.0}
    scaled = decoder_config.rope != "plain" and near != {0.0}
    if len(usual) > 1 or len(near) > 1 or usual == {0.0} or scaled:
        raise unsupported(
            config,
            f"layer_rope_theta = {bases}, and only one base outside of the layers with a window "
            "and one within can be represented, this one not scaled",
        )
    decoder_config = dataclasses.replace(
        decoder_config,
        normalizer=str(Softmax1(learned=True)),
        rope_theta=usual.pop(),
        local_layers=tuple(local),
        local_theta=near.pop(),
    )
    return add_window(config, decoder_config)


def to_hf_config(config: ModelConfig) -> PreTrainedConfig:
    """Return the nearest configuration of a Granite, or of one with sinks."""
    common: dict[str, Any] = llama.shared_fields(config) | {
        "head_dim": config.shape.head_width,
        "attention_bias": config.out_bias,
        "mlp_bias": config.bias,
        "attention_multiplier": (config.query_scalar or config.shape.head_width) ** -0.5,
        "embedding_multiplier": math.sqrt(config.width) if config.embedding == "scaled" else 1.0,
    }
    if SWA is None or not isinstance(build("normalizers", config.normalizer), Softmax1):
        return GraniteConfig(**common)
    bases = [
        config.local_theta if n in config.local_layers else config.rope_theta
        for n in range(config.num_layers)
    ]
    narrow = window_fields(
        config if config.has_short_window else dataclasses.replace(config, local_layers=())
    )
    return SWA(**common, **narrow, layer_rope_theta=bases)


def links(config: ModelConfig) -> list[Link]:
    """Return every tensor of a Transformers checkpoint with our parameters that it holds."""
    pairs = llama.links(config)
    if isinstance(build("normalizers", config.normalizer), Softmax1):
        for layer in range(config.num_layers):
            sinks = f"blocks.{layer}.attention.dot.normalizer.log_sinks"
            pairs.append(Link(f"layers.{layer}.{SINKS}", (sinks,)))
    return pairs


FAMILY = dataclasses.replace(
    llama.FAMILY,
    kinds=("granite", "granite_swa"),
    from_hf_config=from_hf_config,
    to_hf_config=to_hf_config,
    links=links,
)
