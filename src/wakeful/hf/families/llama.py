"""Llama, Mistral, Qwen2, Qwen3, SmolLM, SmolLM3: RMSNorm, RoPE, SwiGLU."""

import dataclasses
from typing import Any

from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.hf.families import base
from wakeful.variants import build

_FIELD_NAMES = base.COMMON_FIELDS | {"rms_norm_eps": "norm_eps"}
_NORMS = {
    "pre": (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm")),
    "peri": (
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "attention_output_norm"),
        ("pre_feedforward_layernorm", "mlp_norm"),
        ("post_feedforward_layernorm", "mlp_output_norm"),
    ),
    "reordered": (
        ("post_attention_layernorm", "attention_output_norm"),
        ("post_feedforward_layernorm", "mlp_output_norm"),
    ),
}
"""Names of a layer's norms, by placement."""


def from_hf_config(config: PreTrainedConfig, max_length: int) -> ModelConfig:
    """Convert the configuration of a Llama, Mistral, Qwen2, Qwen3 or SmolLM3 to ours, with a
    context of `max_length` tokens (0: its own).

    Raises:
        WakefulError: our decoder cannot represent it.
    """
    c: Any = config
    base.check_field(config, "hidden_act", "silu", "swish")
    shared = shared_config(config, max_length)
    decoder_config = dataclasses.replace(
        shared,
        bias=bool(getattr(c, "mlp_bias", False)),
        # Every Qwen2 has these biases: no field says so.
        attention_bias="qkv" if c.model_type == "qwen2" else shared.attention_bias,
        qk_norm=c.model_type == "qwen3",
        # Our decoder's local layers have a RoPE base of their own, `local_theta`. It stays 0, its
        # default, which stands for no RoPE.
        local_layers=_layers_without_rope(c) if c.model_type == "smollm3" else (),
    )
    return base.add_window(config, decoder_config)


def shared_config(config: PreTrainedConfig, max_length: int, layer_type: str = "") -> ModelConfig:
    """Convert to ours the fields that the configurations of Llama and similar architectures (Gemma,
    Granite, Phi-3 …) have in common. The caller adds the others.

    The context has `max_length` tokens (0: the configuration's own). `layer_type` selects the RoPE
    where the configuration has one per type of layer.

    Raises:
        WakefulError: the RoPE or the context length cannot be represented.
    """
    c: Any = config
    theta, rope, rotary_share = base.read_rope(config, layer_type)
    # Only Phi-3's code reads the share; the other architectures ignore it.
    if rotary_share != 1.0 and c.model_type != "phi3":
        raise WakefulError(
            f"rope_parameters.partial_rotary_factor = {rotary_share}, and a {c.model_type} rotates "
            "all of a head's channels"
        )
    head_width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return ModelConfig(
        **base.read_fields(config, _FIELD_NAMES),
        max_length=base.choose_context(config, max_length),
        num_kv_heads=c.num_key_value_heads,
        head_width=head_width,
        norm="rmsnorm",
        positions="rotary",
        rope_theta=theta,
        rope=rope,
        rotary_width=base.rotary_width(rotary_share, head_width),
        mlp="swiglu",
        # Mistral and Qwen2 lack the field.
        attention_bias="all" if getattr(c, "attention_bias", False) else "none",
    )


def _layers_without_rope(config: Any) -> tuple[int, ...]:
    """Return the layers of a SmolLM3 whose flag in `no_rope_layers` is 0: they have no RoPE."""
    rope_flags = config.no_rope_layers[: config.num_hidden_layers]
    return tuple(layer for layer, has_rope in enumerate(rope_flags) if not has_rope)


def to_hf_config(config: ModelConfig) -> PreTrainedConfig:
    """Return the configuration of the nearest of these architectures, the first that fits: SmolLM3
    if local layers have no RoPE, Qwen3 if queries and keys are normalized, Mistral if layers have a
    window, Qwen2 if only queries, keys and values have biases, else Llama. What such a model cannot
    have is left out.
    """
    common: dict[str, Any] = shared_fields(config) | {"head_dim": config.shape.head_width}
    attention_bias = config.out_bias  # in Transformers: of all four projections or of none
    window: dict[str, Any] = {}
    if config.has_short_window:
        window = base.window_fields(config) | {"use_sliding_window": True}
    if config.local_layers and not config.local_theta:  # a base of 0 stands for no RoPE
        rope_flags = [int(layer not in config.local_layers) for layer in range(config.num_layers)]
        return SmolLM3Config(
            **common, **window, attention_bias=attention_bias, mlp_bias=config.bias,
            no_rope_layers=rope_flags,
            pad_token_id=None,  # Transformers' default may lie outside of the vocabulary
        )  # fmt: skip
    if config.qk_norm:
        return Qwen3Config(**common, **window, attention_bias=attention_bias)
    if config.has_short_window and not config.qkv_bias:
        return MistralConfig(**common, sliding_window=config.window)
    only_qkv_bias = config.qkv_bias and not config.out_bias
    # Transformers refuses a Llama, but no Qwen2, whose width is no multiple of the heads.
    if only_qkv_bias or config.width % config.num_heads:
        return Qwen2Config(**common, **window)
    return LlamaConfig(**common, attention_bias=attention_bias, mlp_bias=config.bias)


def shared_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that the configurations of Llama and of similar architectures have in
    common, under Transformers' names.
    """
    return base.transformers_fields(config, _FIELD_NAMES) | {
        "max_position_embeddings": config.max_length,
        "num_key_value_heads": config.shape.num_kv_heads,
        "rope_parameters": base.rope_parameters(config),
    }


def links(config: ModelConfig) -> list[base.Link]:
    """Return a link from every tensor of a checkpoint to the decoder parameters that it holds."""
    model_links = base.unchanged_links("embed_tokens", "embed", "weight")
    model_links += base.unchanged_links("norm", "norm", "weight")
    if not config.tied:
        model_links += base.unchanged_links("lm_head", "head", "weight")
    norms = _NORMS[str(build("placements", config.placement))]
    for layer in range(config.num_layers):
        modules = [  # (name in Transformers, name in our decoder, whether it has a bias)
            ("self_attn.q_proj", "attention.query", config.qkv_bias),
            ("self_attn.k_proj", "attention.key", config.qkv_bias),
            ("self_attn.v_proj", "attention.value", config.qkv_bias),
            ("self_attn.o_proj", "attention.out", config.out_bias),
            ("mlp.gate_proj", "mlp.gate", config.bias),
            ("mlp.up_proj", "mlp.up", config.bias),
            ("mlp.down_proj", "mlp.down", config.bias),
            *((hf_name, decoder_name, False) for hf_name, decoder_name in norms),
        ]
        if config.qk_norm:
            modules += [
                ("self_attn.q_norm", "attention.query.norm", False),
                ("self_attn.k_norm", "attention.key.norm", False),
            ]
        for hf_name, decoder_name, has_bias in modules:
            parts = ("weight", "bias") if has_bias else ("weight",)
            model_links += base.unchanged_links(
                f"layers.{layer}.{hf_name}", f"blocks.{layer}.{decoder_name}", *parts
            )
    return model_links


FAMILY = base.Family(
    model_types=("llama", "mistral", "qwen2", "qwen3", "smollm3"),
    prefix="model.",
    from_hf_config=from_hf_config,
    to_hf_config=to_hf_config,
    links=links,
    ignored=r"rotary_emb\.inv_freq",
)
