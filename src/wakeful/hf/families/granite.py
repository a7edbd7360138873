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
    """Convert the configuration of a Granite, or of a Granite SWA (with sinks), to ours, with a
    context of `max_length` tokens (0: its own).

    Raises:
        WakefulError: our decoder cannot represent it.
    """
    c: Any = config
    check_field(config, "hidden_act", "silu", "swish")
    # Our decoder scales neither sublayers' outputs nor logits, and embeddings only by √width.
    check_field(config, "residual_multiplier", 1.0)
    check_field(config, "logits_scaling", 1.0)
    check_field(config, "embedding_multiplier", 1.0, math.sqrt(c.hidden_size))
    # Our decoder divides attention logits by the root of a whole number, `query_scalar`.
    query_scalar = round(c.attention_multiplier**-2)
    if query_scalar**-0.5 != c.attention_multiplier:
        problem = f"attention_multiplier = {c.attention_multiplier}"
        raise unsupported(config, f"{problem}, which is not one over the root of a whole number")
    shared = llama.shared_config(config, max_length)
    decoder_config = dataclasses.replace(
        shared,
        bias=bool(c.mlp_bias),
        query_scalar=query_scalar,
        embedding="plain" if c.embedding_multiplier == 1 else "scaled",
    )
    if c.model_type == "granite":
        return decoder_config
    return _add_sinks(config, decoder_config)


def _add_sinks(config: PreTrainedConfig, decoder_config: ModelConfig) -> ModelConfig:
    """Return `decoder_config` with the sinks, RoPE bases and window of a Granite SWA.

    A Granite SWA lists a RoPE base for each layer (0: no RoPE). In ours, the layers with the window
    become the local ones; if no window hides anything, the layers with the smallest of several
    bases do.

    Raises:
        WakefulError: the local layers have several bases or a scaled RoPE, or the other layers have
            several bases or no RoPE.
    """
    c: Any = config
    bases = [float(theta) for theta in c.layer_rope_theta]
    local = [n for n, layer_type in enumerate(c.layer_types) if layer_type == SLIDING]
    window = c.sliding_window
    if not local or window is None or window >= decoder_config.max_length:
        smallest = min(bases, default=0.0)
        local = [n for n, theta in enumerate(bases) if theta == smallest]
        if len(local) == len(bases):  # all layers have the same base: none is local
            local = []
    global_bases = {theta for n, theta in enumerate(bases) if n not in local}
    global_bases = global_bases or {decoder_config.rope_theta}  # every layer is local
    local_bases = {bases[n] for n in local} or {0.0}  # no layer is local
    scales_local = decoder_config.rope != "plain" and local_bases != {0.0}
    if len(global_bases) > 1 or len(local_bases) > 1 or global_bases == {0.0} or scales_local:
        raise unsupported(
            config,
            f"layer_rope_theta = {bases}, and only one base outside of the layers with a window "
            "and one within can be represented, this one not scaled",
        )
    decoder_config = dataclasses.replace(
        decoder_config,
        normalizer=str(Softmax1(learned=True)),
        rope_theta=global_bases.pop(),
        local_layers=tuple(local),
        local_theta=local_bases.pop(),
    )
    return add_window(config, decoder_config)


def to_hf_config(config: ModelConfig) -> PreTrainedConfig:
    """Return the nearest configuration of a Granite SWA if our decoder has sinks (softmax-1) and
    Transformers has that class, else of a Granite. What such a model cannot have is left out.
    """
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
    if not config.has_short_window:  # layers are local for their RoPE base alone, written above
        config = dataclasses.replace(config, local_layers=())
    return SWA(**common, **window_fields(config), layer_rope_theta=bases)


def links(config: ModelConfig) -> list[Link]:
    """Return a link from every tensor of a checkpoint to the decoder parameters that it holds: a
    Llama's, and with softmax-1 the logarithms of each layer's sinks.
    """
    model_links = llama.links(config)
    if isinstance(build("normalizers", config.normalizer), Softmax1):
        for layer in range(config.num_layers):
            sinks = f"blocks.{layer}.attention.dot.normalizer.log_sinks"
            model_links.append(Link(f"layers.{layer}.{SINKS}", (sinks,)))
    return model_links


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("granite", "granite_swa"),
    from_hf_config=from_hf_config,
    to_hf_config=to_hf_config,
    links=links,
)
