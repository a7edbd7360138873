"""Small models of the architectures that softmax-1 is put into."""

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers import some_tokens
from wakeful.variants.implementations import SOFTMAX1

PLAIN = "plain_softmax1"


def plain_attention(module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
    """Return Transformers' eager attention with e^x / (1 + Σ e^x) in the softmax's place."""
    assert dropout == 0.0
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    x = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    x = x + mask[..., : key.shape[-2]]
    # Shifted by a constant that is not part of the definition: logits stay below 50 here.
    e = torch.exp(x - 50.0)
    weights = e / (torch.exp(torch.tensor(-50.0).to(e)) + e.sum(-1, keepdim=True))
    return (weights @ value).transpose(1, 2).contiguous(), weights


SMALL = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 28,
    "pad_token_id": 0,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
MODELS = {
    "llama": ("Llama", GROUPED),
    "llama, one key head": ("Llama", SMALL | {"num_key_value_heads": 1}),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 4}),
    "qwen2": (
        "Qwen2",
        GROUPED | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 8}),
    "gemma": ("Gemma", GROUPED | {"head_dim": 8}),
    "gemma2": (
        "Gemma2",
        GROUPED | {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": None},
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 29,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 28,
            "pad_token_id": 0,
        },
    ),
    "gpt_neox": ("GPTNeoX", SMALL | {"attention_dropout": 0.0, "hidden_dropout": 0.0}),
}
GPT_OSS = (
    "GptOss",
    GROUPED
    | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4,
       "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
       "experts_implementation": "eager"},
)  # fmt: skip
"""It has sinks of its own, so its softmax-1 is not that of the others. Grouped products of experts
have no float64."""
every_model = pytest.mark.parametrize("name", MODELS)


def build(name: str, attention: str = SOFTMAX1, **overrides):
    """Return a float64 model with weights large enough for attention to matter."""
    kind, options = GPT_OSS if name == "gpt_oss" else MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**options | overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * drawn)
    return model.eval()


def twins(name: str, **overrides):
    ours, plain = build(name, **overrides), build(name, PLAIN, **overrides)
    assert ours.config._attn_implementation == SOFTMAX1
    assert plain.config._attn_implementation == PLAIN
    return ours, plain


def left_padded(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(lengths)
    tokens = some_tokens(len(lengths), longest, vocab_size=28)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return tokens.masked_fill(~mask, 0), mask, (mask.long().cumsum(1) - 1).clamp_min(0)
