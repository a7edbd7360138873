"""GPT-NeoX and Pythia: LayerNorm, partial RoPE, exact GELU, blocks in parallel."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GPTNeoXConfig, PreTrainedConfig

from wakeful.config.model import MLPName, ModelConfig
from wakeful.hf.families import base
from wakeful.hf.families.gpt2 import PROJECTIONS

_GELU: dict[str, MLPName] = {**base.GELU, "gelu_fast": "gelu"}
_FIELD_NAMES = base.COMMON_FIELDS | {
    "layer_norm_eps": "norm_eps", "use_parallel_residual": "parallel",
}  # fmt: skip


def from_hf_config(config: PreTrainedConfig, max_length: int) -> ModelConfig:
    """Convert the configuration of a GPT-NeoX to ours, with a context of `max_length` tokens (0:
    its own).

    Raises:
        WakefulError: our decoder cannot represent it.
    """
    c: Any = config
    base.check_field(config, "hidden_act", *_GELU)
    theta, rope, share = base.read_rope(config)
    return ModelConfig(
        **base.read_fields(config, _FIELD_NAMES),
        max_length=base.choose_context(config, max_length),
        norm="layernorm",
        positions="rotary",
        rope_theta=theta,
        rope=rope,
        rotary_width=base.rotary_width(share, c.hidden_size // c.num_attention_heads),
        mlp=_GELU[c.hidden_act],
        bias=True,
        attention_bias="all" if c.attention_bias else "none",
    )


def to_hf_config(config: ModelConfig) -> PreTrainedConfig:
    """Return the nearest configuration of a GPT-NeoX. What a GPT-NeoX cannot have is left out."""
    head_width = config.shape.head_width
    share = (config.rotary_width or head_width) / head_width
    fields = base.transformers_fields(config, _FIELD_NAMES)
    # Transformers refuses a width that is no multiple of the heads. If this is another width, the
    # configuration is that of another model, and the decoder is not written as a GPT-NeoX.
    fields["hidden_size"] = config.num_heads * head_width
    return GPTNeoXConfig(
        **fields,
        max_position_embeddings=config.max_length,
        hidden_act=base.GELU_NAMES.get(config.mlp, "gelu"),
        rope_parameters=base.rope_parameters(config) | {"partial_rotary_factor": share},
        attention_bias=config.out_bias,
    )


def links(config: ModelConfig) -> list[base.Link]:
    """Return a link from every tensor of a checkpoint to the decoder parameters that it holds."""
    model_links = base.unchanged_links("embed_in", "embed", "weight")
    model_links += base.unchanged_links("final_layer_norm", "norm", "weight", "bias")
    if not config.tied:
        model_links += base.unchanged_links("lm_head", "head", "weight")
    split = partial(_split_heads, config.num_heads)
    join = partial(_join_heads, config.num_heads)
    attention_parts = ("weight", "bias") if config.qkv_bias else ("weight",)
    for layer in range(config.num_layers):
        hf_prefix, prefix = f"layers.{layer}", f"blocks.{layer}"
        for hf_name, decoder_name in (
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "mlp_norm"),
            ("mlp.dense_h_to_4h", "mlp.up"),
            ("mlp.dense_4h_to_h", "mlp.down"),
        ):
            model_links += base.unchanged_links(
                f"{hf_prefix}.{hf_name}", f"{prefix}.{decoder_name}", "weight", "bias"
            )
        model_links += base.unchanged_links(
            f"{hf_prefix}.attention.dense", f"{prefix}.attention.out", *attention_parts
        )
        for part in attention_parts:  # query, key and value, fused in one tensor
            fused_name = f"{hf_prefix}.attention.query_key_value.{part}"
            decoder_names = tuple(f"{prefix}.{name}.{part}" for name in PROJECTIONS)
            model_links.append(base.Link(fused_name, decoder_names, split, join))
    return model_links


def _split_heads(heads: int, tensor: Tensor) -> Sequence[Tensor]:
    """Split a fused projection (heads · 3 · d, in) into the projections of queries, of keys and of
    values, each (heads · d, in). The fused rows are the first head's query, key and value, then
    those of the second head, and so on; a fused bias is split likewise.
    """
    by_head = tensor.unflatten(0, (heads, 3, -1))
    return tuple(by_head[:, part].flatten(0, 1) for part in range(3))


def _join_heads(heads: int, tensors: Sequence[Tensor]) -> Tensor:
    """Fuse query, key and value projections (heads · d, in) into one (heads · 3 · d, in): the
    inverse of `_split_heads`.
    """
    by_head = [tensor.unflatten(0, (heads, -1)) for tensor in tensors]
    return torch.stack(by_head, 1).flatten(0, 2)


FAMILY = base.Family(
    model_types=("gpt_neox",),
    prefix="gpt_neox.",
    from_hf_config=from_hf_config,
    to_hf_config=to_hf_config,
    links=links,
    aliases=(("embed_out.weight", "lm_head.weight"),),
    ignored=r"rotary_emb\.inv_freq|attention\.(bias|masked_bias)",
)
