"""GPT-2: LayerNorm, learned positions, GELU, matrices stored (in, out)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, PreTrainedConfig

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.hf.families import base

_FIELD_NAMES = {
    "vocab_size": "vocab_size",
    "n_positions": "max_length",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_embd": "width",
    "n_inner": "mlp_width",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tied",
    "scale_attn_by_inverse_layer_idx": "scale_logits_by_layer",
    "initializer_range": "init_std",
}
PROJECTIONS = ("attention.query", "attention.key", "attention.value")
_CONV1D = {
    "attn.c_proj": ("attention.out",),
    "mlp.c_fc": ("mlp.up",),
    "mlp.c_proj": ("mlp.down",),
    "attn.c_attn": PROJECTIONS,
}
"""A layer's modules that store their matrices (in, out), and which of ours each holds."""


def from_hf_config(config: PreTrainedConfig, max_length: int) -> ModelConfig:
    """Convert the configuration of a GPT-2 to ours.

    Raises:
        WakefulError: our decoder cannot represent it, or `max_length` is neither 0 nor the number
            of its learned positions.
    """
    c: Any = config
    base.check_field(config, "activation_function", *base.GELU)
    base.check_field(config, "scale_attn_weights", True)
    base.check_field(config, "add_cross_attention", False)
    if max_length not in (0, c.n_positions):
        raise WakefulError(
            f"max_length = {max_length}, but a gpt2 has learned positions, {c.n_positions} of them"
        )
    fields = base.read_fields(config, _FIELD_NAMES) | {"mlp_width": c.n_inner or 4 * c.n_embd}
    # No field says what every GPT-2 has: LayerNorm, learned positions, biases, and (when it is
    # new) output and down projections that are divided by √(2 · layers).
    return ModelConfig(
        **fields,
        norm="layernorm",
        positions="learned",
        mlp=base.GELU[c.activation_function],
        bias=True,
        scale_residual_init=True,
    )


def to_hf_config(config: ModelConfig) -> PreTrainedConfig:
    """Return the nearest configuration of a GPT-2, without dropout. What a GPT-2 cannot have is
    left out.
    """
    return GPT2Config(
        **base.transformers_fields(config, _FIELD_NAMES),
        activation_function=base.GELU_NAMES.get(config.mlp, "gelu_new"),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )


def links(config: ModelConfig) -> list[base.Link]:
    """Return a link from every tensor of a checkpoint to the decoder parameters that it holds."""
    model_links = base.unchanged_links("wte", "embed", "weight")
    model_links += base.unchanged_links("wpe", "positions", "weight")
    model_links += base.unchanged_links("ln_f", "norm", "weight", "bias")
    if not config.tied:
        model_links += base.unchanged_links("lm_head", "head", "weight")
    for layer in range(config.num_layers):
        hf_prefix, prefix = f"h.{layer}", f"blocks.{layer}"
        for hf_name, decoder_name in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            model_links += base.unchanged_links(
                f"{hf_prefix}.{hf_name}", f"{prefix}.{decoder_name}", "weight", "bias"
            )
        # Modules of the class `Conv1D` store matrices transposed, and some hold several of ours.
        for hf_module, decoder_modules in _CONV1D.items():
            split = partial(_split_conv1d, len(decoder_modules))
            for part in ("weight", "bias"):
                hf_name = f"{hf_prefix}.{hf_module}.{part}"
                decoder_names = tuple(f"{prefix}.{name}.{part}" for name in decoder_modules)
                model_links.append(base.Link(hf_name, decoder_names, split, _join_conv1d))
    return model_links


def _split_conv1d(count: int, tensor: Tensor) -> Sequence[Tensor]:
    """Transpose a `Conv1D` matrix (in, out) and split its outputs into `count` equal matrices; a
    bias (out) is only split.
    """
    return tensor.t().chunk(count)  # t() leaves a bias as it is


def _join_conv1d(tensors: base.Tensors) -> Tensor:
    """Join matrices (out, in) into the matrix (in, out) of a `Conv1D`, or biases into one bias."""
    first, *rest = tensors
    return (torch.cat(tensors) if rest else first).t()  # a single tensor is not copied


FAMILY = base.Family(
    model_types=("gpt2",),
    prefix="transformer.",
    from_hf_config=from_hf_config,
    to_hf_config=to_hf_config,
    links=links,
    ignored=r"attn\.(bias|masked_bias)",
)
