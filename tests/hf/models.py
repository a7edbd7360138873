"""Small models of our own in Transformers' clothes."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers import some_tokens, tiny_decoder
from wakeful.hf import as_transformers
from wakeful.hf.modeling import WakefulForCausalLM
from wakeful.model.decoder import Decoder

VARIANTS = {
    "vanilla": {},
    "svformer": {"route": "svformer"},
    "two anchors": {"route": "svformer(anchors=[0, 2])"},
    "cla": {"route": "cla"},
    "resformer": {"route": 'resformer(mode="learnable")'},
    "softmax-1": {"normalizer": "softmax1", "tied": True},
    "learned sink": {"normalizer": "softmax1(learned=True)", "route": "resformer"},
    "denseformer": {"depth": "denseformer"},
    "gpt-2": {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "bias": True},
    "no positions": {"positions": "none"},
    "norms around": {"placement": "peri", "norm": "layernorm", "bias": True},
    "norms over sums, then before": {"placement": "mixed(share=0.5)"},
    "odd parts": {
        "qk_norm": True, "attention_bias": "qkv", "parallel": True, "rotary_width": 2,
        "rope": "linear(factor=2.0)", "norm": "rmsnorm_single",
    },
}  # fmt: skip


def pair(
    dtype: torch.dtype = torch.float64, **overrides: object
) -> tuple[Decoder, WakefulForCausalLM]:
    """Return a decoder and our class around a copy of its weights, both in evaluation mode."""
    options = {"max_length": 64} | overrides
    decoder = tiny_decoder(dtype=dtype, **options).eval()
    model = as_transformers(tiny_decoder(dtype=dtype, **options)).eval()
    return decoder, model


def padded(tokens: Tensor, *lengths: int) -> tuple[Tensor, Tensor]:
    """Return tokens whose rows keep so many of their last, and the mask that says which."""
    length = tokens.shape[1]
    mask = torch.arange(length) >= length - torch.tensor(lengths).unsqueeze(1)
    return tokens.masked_fill(~mask, 28), mask.long()


def inputs_of(kind: str) -> dict[str, Tensor]:
    """Return two rows of 12 tokens with a mask or positions of one of the `INPUTS`."""
    tokens = some_tokens(2, 12)
    if kind == "all real":
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if kind == "padded":
        tokens, mask = padded(tokens, 12, 7)
        return {"input_ids": tokens, "attention_mask": mask}
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    if kind == "counted":
        places = torch.arange(12)[None]
    return {"input_ids": tokens, "position_ids": places.expand(2, -1)}


INPUTS = ("all real", "padded", "packed", "counted")

RECOMPUTE = (
    "activation_checkpointing"
    if hasattr(PreTrainedModel, "activation_checkpointing_enable")
    else "gradient_checkpointing"
)
"""What recomputed activations are called: newer Transformers renamed them."""


def recompute(model: PreTrainedModel, options: dict[str, bool] | None = None) -> None:
    """Let a model compute its activations again in the backward pass."""
    getattr(model, f"{RECOMPUTE}_enable")(options)
