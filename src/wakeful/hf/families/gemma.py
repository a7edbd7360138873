"""Gemma 2 and the text part of Gemma 3: norms around sublayers, GeGLU, embeddings times √width."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma3TextConfig, PreTrainedConfig

from wakeful.config.model import ModelConfig
from wakeful.hf.families import base, llama
from wakeful.normalizers import Softcap
from wakeful.variants import build


def from_hf_config(config: PreTrainedConfig, max_length: int) -> ModelConfig:
    """Convert the configuration of a Gemma 2 or of the text part of a Gemma 3 to ours, with a
    context of `max_length` tokens (0: its own).

    Raises:
        WakefulError: our decoder cannot represent it.
    """
    c: Any = config
    is_gemma3 = c.model_type == "gemma3_text"
    base.check_field(config, "hidden_activation", "gelu_pytorch_tanh", "gelu_new")
    base.check_field(config, "use_bidirectional_attention", False, None)
    if is_gemma3:  # Gemma 3's code does not apply the cap that this field names
        base.check_field(config, "attn_logit_softcapping", None)
    sliding = tuple(n for n, kind in enumerate(c.layer_types) if kind == base.SLIDING)
    cap = c.attn_logit_softcapping
    decoder_config = dataclasses.replace(
        # A Gemma 3 has a RoPE for each type of layer; the one of local layers is set below.
        llama.shared_config(config, max_length, layer_type=base.FULL if is_gemma3 else ""),
        placement="peri",
        mlp="geglu",
        embedding="scaled",
        qk_norm=is_gemma3,
        query_scalar=c.query_pre_attn_scalar,
        normalizer=str(Softcap(cap=float(cap))) if cap else "softmax",
        logit_cap=float(c.final_logit_softcapping or 0.0),
        # In a Gemma 2 all layers have the same RoPE; `add_window` makes its sliding layers local.
        local_layers=sliding if is_gemma3 else (),
        local_theta=_local_theta(config) if is_gemma3 else 0.0,
    )
    return base.add_window(config, decoder_config)


def _local_theta(config: PreTrainedConfig) -> float:
    """Return the RoPE base of a Gemma 3's layers with a sliding window.

    Raises:
        WakefulError: the RoPE of these layers is scaled.
    """
    theta, scaling, _ = base.read_rope(config, base.SLIDING)
    if scaling != "plain":
        kind = config.rope_parameters[base.SLIDING]["rope_type"]
        problem = f"rope_parameters.{base.SLIDING}.rope_type = {kind!r}"
        raise base.unsupported(config, f"{problem}, and only 'default' can be represented")
    return theta


def to_hf_config(config: ModelConfig) -> PreTrainedConfig:
    """Return the nearest configuration of a Gemma 3 if queries and keys are normalized (`qk_norm`),
    else of a Gemma 2. What such a model cannot have is left out.
    """
    heads, normalizer = config.num_heads, build("normalizers", config.normalizer)
    common: dict[str, Any] = llama.shared_fields(config) | {
        # Transformers refuses a width that is no multiple of the heads. With the width rounded, the
        # configuration is that of another model, and the decoder is not written as a Gemma.
        "hidden_size": max(1, config.width // heads) * heads,
        "head_dim": config.shape.head_width,
        "attention_bias": config.out_bias,
        "query_pre_attn_scalar": config.query_scalar or config.shape.head_width,
        "final_logit_softcapping": config.logit_cap or None,
        "attn_logit_softcapping": normalizer.cap if isinstance(normalizer, Softcap) else None,
        **base.window_fields(config),
        "pad_token_id": None,  # Transformers' default may lie outside of the vocabulary
    }
    if not config.qk_norm:
        return Gemma2Config(**common)
    local_theta = config.local_theta or 10_000.0  # Gemma 3's own, where no layer is local
    common["rope_parameters"] = {
        base.FULL: base.rope_parameters(config),
        base.SLIDING: {"rope_type": "default", "rope_theta": local_theta},
    }
    return Gemma3TextConfig(**common)


def links(config: ModelConfig) -> list[base.Link]:
    """Return a link for every tensor of a Gemma checkpoint, which stores norm weights minus one."""
    return [
        dataclasses.replace(link, split=_add_one, join=_subtract_one)
        if link.hf_name.endswith("norm.weight")
        else link
        for link in llama.links(config)
    ]


def _add_one(tensor: Tensor) -> Sequence[Tensor]:
    """Return a norm's weight w from the w − 1 that the checkpoint stores, in at least float32."""
    return (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) + 1,)


def _subtract_one(tensors: Sequence[Tensor]) -> Tensor:
    """Return w − 1, which the checkpoint stores, from a norm's weight w, in at least float32."""
    (tensor,) = tensors
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) - 1


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_types=("gemma2", "gemma3_text"),
    from_hf_config=from_hf_config,
    to_hf_config=to_hf_config,
    links=links,
)
