"""Phi-3: a Llama with partial RoPE whose projections of one input are stored as one matrix."""

import dataclasses
from functools import partial

import torch
from transformers import Phi3Config, PreTrainedConfig

from wakeful.config.model import ModelConfig
from wakeful.hf.families import llama
from wakeful.hf.families.base import Link


def to_hf_config(config: ModelConfig) -> PreTrainedConfig:
    """Return the nearest configuration of a Phi-3. What a Phi-3 cannot have is left out."""
    head_width = config.shape.head_width
    share = (config.rotary_width or head_width) / head_width
    fields = llama.shared_fields(config)
    fields["rope_parameters"] = {
        "rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": share,
    }  # fmt: skip
    # In a Phi-3, all layers have the window or none.
    if len(config.local_layers) == config.num_layers and config.has_short_window:
        fields["sliding_window"] = config.window
    # Transformers' default pad token may lie outside of the vocabulary.
    return Phi3Config(**fields, pad_token_id=None)


def links(config: ModelConfig) -> list[Link]:
    """Return a link for every tensor of a Phi-3 checkpoint, which fuses query, key and value
    projections into one matrix, and the gate and up projections into another.
    """
    shape = config.shape
    query_rows = shape.num_heads * shape.head_width
    key_rows = shape.num_kv_heads * shape.head_width
    # For each fused matrix, a Llama's matrices in it and the number of their rows.
    fusions = {
        "self_attn.qkv_proj": {"q_proj": query_rows, "k_proj": key_rows, "v_proj": key_rows},
        "mlp.gate_up_proj": {"gate_proj": config.mlp_width, "up_proj": config.mlp_width},
    }
    llama_links = {link.hf_name: link for link in llama.links(config)}
    fused_links: list[Link] = []
    for layer in range(config.num_layers):
        for fused, num_rows in fusions.items():
            module = f"layers.{layer}.{fused.partition('.')[0]}"  # …self_attn or …mlp
            # The fused link takes the place of a Llama's links.
            parts = [llama_links.pop(f"{module}.{name}.weight") for name in num_rows]
            decoder_names = tuple(part.decoder_names[0] for part in parts)
            split = partial(torch.split, split_size_or_sections=[*num_rows.values()])
            hf_name = f"layers.{layer}.{fused}.weight"
            fused_links.append(Link(hf_name, decoder_names, split, torch.cat))
    return [*llama_links.values(), *fused_links]


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("phi3",), to_hf_config=to_hf_config, links=links
)
