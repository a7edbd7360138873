"""Phi-3: a Llama with partial RoPE whose projections of one input are stored as one matrix."""

import dataclasses
from functools import partial

import torch
from transformers import Phi3Config, PreTrainedConfig

from wakeful.config.model import ModelConfig
from wakeful.hf.families import llama
from wakeful.hf.families.base import Link


def to_hf_config(config: ModelConfig) -> PreTrainedConfig:
    """Return the nearest configuration of a Phi-3."""
    head_width = config.shape.head_width
    share = (config.rotary_width or head_width) / head_width
    fields = llama.shared_fields(config)
    fields["rope_parameters"] = {
        "rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": share,
    }  # fmt: skip
    if len(config.local_layers) == config.num_layers and config.has_short_window:
        fields["sliding_window"] = config.window
    return Phi3Config(**fields, pad_token_id=None)


def links(config: ModelConfig) -> list[Link]:
    """Return a link for every tensor of a Phi-3 checkpoint, which fuses query, key and value
    projections into one matrix, and the gate and up projections into another.
    """
    shape = config.shape
    heads, groups = (n * shape.head_width for n in (shape.num_heads, shape.num_kv_heads))
    rows = {
        "self_attn.qkv_proj": {"q_proj": heads, "k_proj": groups, "v_proj": groups},
        "mlp.gate_up_proj": {"gate_proj": config.mlp_width, "up_proj": config.mlp_width},
    }
    plain = {link.hf_name: link for link in llama.links(config)}
    pairs: list[Link] = []
    for layer in range(config.num_layers):
        for fused, parts in rows.items():
            half = f"layers.{layer}.{fused.partition('.')[0]}"
            decoder_names = tuple(
                plain.pop(f"{half}.{part}.weight").decoder_names[0] for part in parts
            )
            split = partial(torch.split, split_size_or_sections=[*parts.values()])
            pairs.append(Link(f"layers.{layer}.{fused}.weight", decoder_names, split, torch.cat))
    return [*plain.values(), *pairs]


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("phi3",), to_hf_config=to_hf_config, links=links
)
