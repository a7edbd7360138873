"""Llama, Mistral, Qwen2, Qwen3, SmolLM: RMSNorm, RoPE, SwiGLU."""

from typing import Any

from transformers import PreTrainedConfig

from wakeful.hf.families.base import Family, Link, context, demand, rope_of, rotary_width, same
from wakeful.model.architecture import AttentionBias, ModelConfig


def describe(config: PreTrainedConfig, max_length: int) -> ModelConfig:
    """Return our configuration of a Llama or one of its kin."""
    c: Any = config
    demand(config, "hidden_act", "silu", "swish")
    theta, rope, share = rope_of(config)
    head_width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    # Qwen2 has these biases without a field that says so; Mistral's field does not exist.
    biased = bool(getattr(c, "attention_bias", False))
    attention: AttentionBias = "all" if biased else "none"
    if c.model_type == "qwen2":
        attention = "qkv"
    return ModelConfig(
        vocab_size=c.vocab_size,
        max_length=context(config, max_length),
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        width=c.hidden_size,
        head_width=head_width,
        mlp_width=c.intermediate_size,
        norm="rmsnorm",
        norm_eps=c.rms_norm_eps,
        positions="rotary",
        rope_theta=theta,
        rope=rope,
        rotary_width=rotary_width(share, head_width),
        mlp="swiglu",
        bias=bool(getattr(c, "mlp_bias", False)),
        attention_bias=attention,
        qk_norm=c.model_type == "qwen3",
        tied=bool(c.tie_word_embeddings),
        init_std=c.initializer_range,
    )


def links(config: ModelConfig) -> list[Link]:
    """Return the name of every tensor."""
    found = same("embed_tokens", "embed", "weight") + same("norm", "norm", "weight")
    if not config.tied:
        found += same("lm_head", "head", "weight")
    for layer in range(config.num_layers):
        modules = [
            ("self_attn.q_proj", "attention.query", config.qkv_bias),
            ("self_attn.k_proj", "attention.key", config.qkv_bias),
            ("self_attn.v_proj", "attention.value", config.qkv_bias),
            ("self_attn.o_proj", "attention.out", config.out_bias),
            ("mlp.gate_proj", "mlp.gate", config.bias),
            ("mlp.up_proj", "mlp.up", config.bias),
            ("mlp.down_proj", "mlp.down", config.bias),
            ("input_layernorm", "attention_norm", False),
            ("post_attention_layernorm", "mlp_norm", False),
        ]
        if config.qk_norm:
            modules += [
                ("self_attn.q_norm", "attention.query.norm", False),
                ("self_attn.k_norm", "attention.key.norm", False),
            ]
        for theirs, ours, biased in modules:
            parts = ("weight", "bias") if biased else ("weight",)
            found += same(f"layers.{layer}.{theirs}", f"blocks.{layer}.{ours}", *parts)
    return found


FAMILY = Family(prefix="model.", describe=describe, links=links, ignored=r"rotary_emb\.inv_freq")
