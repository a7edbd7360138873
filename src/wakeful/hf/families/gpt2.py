"""GPT-2: LayerNorm, learned positions, GELU, matrices stored (in, out)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, PreTrainedConfig

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.hf.families import base

_ALIKE = {
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
PROJECTIONS = ("query", "key", "value")


def describe(config: PreTrainedConfig, max_length: int) -> ModelConfig:
    """Return our configuration of a GPT-2."""
    c: Any = config
    base.demand(config, "activation_function", *base.GELU)
    base.demand(config, "scale_attn_weights", True)
    base.demand(config, "add_cross_attention", False)
    if max_length not in (0, c.n_positions):
        raise WakefulError(
            f"max_length = {max_length}, but a gpt2 has learned positions, {c.n_positions} of them"
        )
    fields = base.read(config, _ALIKE) | {"mlp_width": c.n_inner or 4 * c.n_embd}
    return ModelConfig(
        **fields,
        norm="layernorm",
        positions="learned",
        mlp=base.GELU[c.activation_function],
        bias=True,
        scale_residual_init=True,
    )


def compose(config: ModelConfig) -> PreTrainedConfig:
    """Return the nearest configuration of a GPT-2, without dropout."""
    return GPT2Config(
        **base.written(config, _ALIKE),
        activation_function=base.GELU_NAMES.get(config.mlp, "gelu_new"),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )


def links(config: ModelConfig) -> list[base.Link]:
    """Return the name of every tensor."""
    found = base.same("wte", "embed", "weight") + base.same("wpe", "positions", "weight")
    found += base.same("ln_f", "norm", "weight", "bias")
    if not config.tied:
        found += base.same("lm_head", "head", "weight")
    for layer in range(config.num_layers):
        theirs, ours = f"h.{layer}", f"blocks.{layer}"
        for one, other in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            found += base.same(f"{theirs}.{one}", f"{ours}.{other}", "weight", "bias")
        for one, other in (
            ("attn.c_proj", "attention.out"),
            ("mlp.c_fc", "mlp.up"),
            ("mlp.c_proj", "mlp.down"),
        ):
            found.append(base.transposed(f"{theirs}.{one}.weight", f"{ours}.{other}.weight"))
            found += base.same(f"{theirs}.{one}", f"{ours}.{other}", "bias")
        for part in ("weight", "bias"):
            three = tuple(f"{ours}.attention.{name}.{part}" for name in PROJECTIONS)
            found.append(base.Link(f"{theirs}.attn.c_attn.{part}", three, _thirds, _side_by_side))
    return found


def _thirds(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.T.chunk(3) if tensor.ndim == 2 else tensor.chunk(3)


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    joined = torch.cat(list(tensors))
    return joined.T if joined.ndim == 2 else joined


FAMILY = base.Family(
    kinds=("gpt2",),
    prefix="transformer.",
    describe=describe,
    compose=compose,
    links=links,
    ignored=r"attn\.(bias|masked_bias)",
)
