"""Small models of the families that GGUF files hold, and tokenizers for them."""

import torch
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, normalizers
from tokenizers import models as kinds

from wakeful.config.model import ModelConfig
from wakeful.data.tokenizer import Tokenizer
from wakeful.hf.families.granite import SWA
from wakeful.model.decoder import Decoder

SHAPE = {
    "max_length": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "width": 64,
    "mlp_width": 96,
}  # fmt: skip
GPT2 = {
    "num_kv_heads": 4, "mlp_width": 256, "norm": "layernorm", "mlp": "gelu", "bias": True,
    "positions": "learned", "tied": True, "max_length": 1024,  # the only one Transformers reads
}  # fmt: skip
GEMMA = {
    "placement": "peri", "mlp": "geglu", "embedding": "scaled", "tied": True, "norm_eps": 1e-6,
}  # fmt: skip
GEMMA2 = {
    **GEMMA, "normalizer": "softcap(cap=50.0)", "logit_cap": 30.0, "query_scalar": 24,
    "num_layers": 3,
}  # fmt: skip
WIDE = {"num_heads": 1, "num_kv_heads": 1, "head_width": 256, "query_scalar": 256}
"""What Transformers takes for granted of a Gemma in a GGUF file."""
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama, llama3": ("llama", {"rope": "llama3(factor=8.0, original_length=8192)"}),
    "llama, linear": ("llama", {"rope": "linear(factor=2.0)", "tied": True}),
    "mistral": ("llama", {"local_layers": (0, 1), "local_theta": 10_000.0, "window": 24}),
    "qwen2": ("qwen2", {"attention_bias": "qkv", "tied": True}),
    "qwen2, windows": (
        "qwen2",
        {"attention_bias": "qkv", "local_layers": (1,), "local_theta": 10_000.0, "window": 30},
    ),
    "qwen3": ("qwen3", {"qk_norm": True, "head_width": 128}),
    "smollm3": ("smollm3", {"num_layers": 5, "local_layers": (3,), "tied": True}),
    "phi3": ("phi3", {"rotary_width": 8}),
    "phi3, windows": (
        "phi3",
        {
            "rotary_width": 12, "local_layers": (0, 1), "local_theta": 10_000.0, "window": 24,
            "num_kv_heads": 4,
        },
    ),
    "olmo2": ("olmo2", {"placement": "reordered", "qk_norm": True, "qk_norm_whole": True}),
    "olmo2, tied": (
        "olmo2",
        {
            "placement": "reordered", "qk_norm": True, "qk_norm_whole": True, "tied": True,
            "rope": "linear(factor=4.0)",
        },
    ),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2, windows": (
        "gemma2", GEMMA2 | {"local_layers": (0, 2), "local_theta": 10_000.0, "window": 8},
    ),
    "gemma2, other windows": (
        "gemma2", GEMMA2 | {"local_layers": (1,), "local_theta": 10_000.0, "window": 24},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GEMMA, "qk_norm": True, "num_layers": 7, "local_layers": (0, 1, 2, 3, 4, 6),
            "local_theta": 10_000.0, "rope_theta": 1e6, "rope": "linear(factor=8.0)", "window": 8,
            "query_scalar": 24, "head_width": 32,
        },
    ),
    "gemma2, as made": (
        "gemma2",
        GEMMA2 | WIDE | {"local_layers": (0, 2), "local_theta": 10_000.0, "window": 8},
    ),
    "gemma3, as made": (
        "gemma3_text",
        {
            **GEMMA, **WIDE, "qk_norm": True, "num_layers": 7,
            "local_layers": (0, 1, 2, 3, 4, 6), "local_theta": 10_000.0, "rope_theta": 1e6,
            "window": 8,
        },
    ),
    "gpt2": ("gpt2", GPT2),
    "granite": ("granite", {"embedding": "scaled", "query_scalar": 40, "bias": True}),
    "granite, scaled": ("granite", {"embedding": "scaled", "rope": "linear(factor=2.0)"}),
    "granite_swa": ("granite_swa", {"normalizer": "softmax1(learned=True)", "bias": True}),
    "granite_swa, constant": ("granite_swa", {"normalizer": "softmax1", "tied": True}),
    "granite_swa, windows": (
        "granite_swa",
        {
            "normalizer": "softmax1(learned=True)", "attention_bias": "all", "window": 8,
            "local_layers": (1,), "local_theta": 10_000.0,
        },
    ),
    "granite_swa, windows alone": (
        "granite_swa",
        {
            "normalizer": "softmax1", "window": 8, "local_layers": (0, 1),
            "local_theta": 10_000.0,
        },
    ),
    "granite_swa, no positions": (
        "granite_swa",
        {
            "normalizer": "softmax1(learned=True)", "embedding": "scaled", "local_layers": (0,),
            "rope": "llama3(factor=8.0, original_length=8192)",
        },
    ),
}  # fmt: skip
"""By a name: the `model_type` that a file holds it as, and what the model differs in."""
if SWA is None:
    FAMILIES = {name: family for name, family in FAMILIES.items() if family[0] != "granite_swa"}
TEXTS = ["a quick brown fox jumps over a lazy dog " * 40]


def decoder(vocab_size: int, **changes: object) -> Decoder:
    torch.manual_seed(0)
    config = {**SHAPE, "vocab_size": vocab_size, **changes}
    made = Decoder(ModelConfig(**config)).eval()  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def sentencepiece(*, prefix: bool = True) -> Tokenizer:
    """Return SentencePiece BPE as `tokenizers` has it, of Llama 2's form or else of Gemma's."""
    words = ["\u2581a", "\u2581qu", "ick", "\u2581d", "og", "\u2581dog"]
    pairs = [("\u2581", "a"), ("q", "u"), ("\u2581", "qu"), ("i", "c"), ("ic", "k"), ("o", "g"),
             ("\u2581", "d"), ("\u2581d", "og")]  # fmt: skip
    singles = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    made = [left + right for left, right in pairs]
    assert set(words) <= set(made)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *made, *singles]
    ids = {token: number for number, token in enumerate(tokens)}
    inner = Inner(kinds.BPE(vocab=ids, merges=pairs, unk_token="<unk>", byte_fallback=True,
                            fuse_unk=True))  # fmt: skip
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    replaced = normalizers.Replace(" ", "\u2581")
    first = [normalizers.Prepend("\u2581")] if prefix else []
    inner.normalizer = normalizers.Sequence([*first, replaced]) if prefix else replaced
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    table = '{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": true}'
    return Tokenizer(inner, end_of_text="</s>", companion_files={"tokenizer_config.json": table})
