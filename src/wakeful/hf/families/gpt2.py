"""GPT-2: LayerNorm, learned positions, GELU, matrices stored (in, out)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, PreTrainedConfig

from wakeful.config.model import MLPName, ModelConfig
from wakeful.errors import WakefulError
from wakeful.hf.families.base import Family, Link, demand, same, transposed

_GELU: dict[str, MLPName] = {
    "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact",
}  # fmt: skip
_NAMES = {"gelu": "gelu_new", "gelu_exact": "gelu"}
PROJECTIONS = ("query", "key", "value")


def describe(config: PreTrainedConfig, max_length: int) -> ModelConfig:
    """Return our configuration of a GPT-2."""
    c: Any = config
    demand(config, "activation_function", *_GELU)
    demand(config, "scale_attn_weights", True)
    demand(config, "add_cross_attention", False)
    if max_length not in (0, c.n_positions):
        raise WakefulError(
            f"max_length = {max_length}, but a gpt2 has learned positions, {c.n_positions} of them"
        )
    return ModelConfig(
        vocab_size=c.vocab_size,
        max_length=c.n_positions,
        num_layers=c.n_layer,
        num_heads=c.n_head,
        width=c.n_embd,
        mlp_width=c.n_inner or 4 * c.n_embd,
        norm="layernorm",
        norm_eps=c.layer_norm_epsilon,
        positions="learned",
        mlp=_GELU[c.activation_function],
        bias=True,
        tied=bool(c.tie_word_embeddings),
        scale_logits_by_layer=bool(c.scale_attn_by_inverse_layer_idx),
        init_std=c.initializer_range,
        scale_residual_init=True,
    )


def compose(config: ModelConfig) -> PreTrainedConfig:
    """Return the nearest configuration of a GPT-2, without dropout."""
    return GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.max_length,
        n_embd=config.width,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_inner=config.mlp_width,
        activation_function=_NAMES.get(config.mlp, "gelu_new"),
        layer_norm_epsilon=config.norm_eps,
        initializer_range=config.init_std,
        scale_attn_by_inverse_layer_idx=config.scale_logits_by_layer,
        tie_word_embeddings=config.tied,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )


def links(config: ModelConfig) -> list[Link]:
    """Return the name of every tensor."""
    found = same("wte", "embed", "weight") + same("wpe", "positions", "weight")
    found += same("ln_f", "norm", "weight", "bias")
    if not config.tied:
        found += same("lm_head", "head", "weight")
    for layer in range(config.num_layers):
        theirs, ours = f"h.{layer}", f"blocks.{layer}"
        for one, other in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            found += same(f"{theirs}.{one}", f"{ours}.{other}", "weight", "bias")
        for one, other in (
            ("attn.c_proj", "attention.out"),
            ("mlp.c_fc", "mlp.up"),
            ("mlp.c_proj", "mlp.down"),
        ):
            found.append(transposed(f"{theirs}.{one}.weight", f"{ours}.{other}.weight"))
            found += same(f"{theirs}.{one}", f"{ours}.{other}", "bias")
        for part in ("weight", "bias"):
            three = tuple(f"{ours}.attention.{name}.{part}" for name in PROJECTIONS)
            found.append(Link(f"{theirs}.attn.c_attn.{part}", three, _thirds, _side_by_side))
    return found


def _thirds(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.T.chunk(3) if tensor.ndim == 2 else tensor.chunk(3)


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    joined = torch.cat(list(tensors))
    return joined.T if joined.ndim == 2 else joined


FAMILY = Family(
    kinds=("gpt2",),
    prefix="transformer.",
    describe=describe,
    compose=compose,
    links=links,
    ignored=r"attn\.(bias|masked_bias)",
)
