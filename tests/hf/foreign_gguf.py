"""GGUF files as llama.cpp's converter and quantizer leave them: its keys, names, order and types.

Nothing of ours takes part. Blocks of K-quants hold random codes and scales; what numbers they stand
for, the package gguf says, and those numbers are the weights of the Transformers model returned.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from wakeful.data.tokenizer import Tokenizer

_SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_ROPES = dict.fromkeys(("full_attention", "sliding_attention"), _SHAPE["rope_parameters"])
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {**_SHAPE, "tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, {**_SHAPE, "tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {**_SHAPE, "head_dim": 128, "tie_word_embeddings": True}),
    "gemma3": (
        Gemma3TextConfig,
        {
            **_SHAPE, "num_hidden_layers": 6, "num_attention_heads": 1, "num_key_value_heads": 1,
            "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 64,
            "rope_parameters": {
                **_ROPES, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
}  # fmt: skip
"""By what llama.cpp calls the architecture: the class and the values of a small model's
configuration."""
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3, "gemma3": gguf.MODEL_ARCH.GEMMA3,
}  # fmt: skip
MEDIUM = {
    "token_embd": Kind.Q5_0, "output": Kind.Q6_K, "attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K,
    "attn_k": Kind.Q8_0, "attn_q": Kind.Q5_K,
}  # fmt: skip
"""The types of matrices in a file like the Q4_K_M of small models, where they are not Q4_K."""
_SCALES = {
    Kind.Q4_K: (slice(0, 4), [3e-4, 2e-3]),
    Kind.Q5_K: (slice(0, 4), [1.5e-4, 2e-3]),
    Kind.Q6_K: (slice(-2, None), [2e-5]),
}
"""Where a K-quant's block has its half-precision scales, and such that make usual weights."""


@torch.no_grad()
def write_foreign(path: Path, architecture: str, tokenizer: Tokenizer) -> PreTrainedModel:
    """Write a small model's file as llama.cpp's converter does; return the model it holds."""
    kind, values = CONFIGS[architecture]
    config = kind(**values, vocab_size=tokenizer.vocab_size)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    writer = gguf.GGUFWriter(path, architecture)
    _write_keys(writer, architecture, config)
    _write_vocabulary(writer, tokenizer)
    draw = np.random.default_rng(0)
    for name in sorted(state, key=lambda each: each != "lm_head.weight"):  # the head comes first
        given = state[name]
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert there is not None
        if given.ndim == 1:
            numbers = draw.normal(float(given.mean()), 0.1, len(given)).astype(np.float32)
            writer.add_tensor(there, numbers)
        else:
            part = there.removesuffix(".weight").rpartition(".")[2]
            stored = MEDIUM.get(part, Kind.Q4_K)
            blocks = _blocks(draw, stored, tuple(given.shape))
            writer.add_tensor(there, blocks, raw_dtype=stored)
            numbers = gguf.quants.dequantize(blocks, stored)
        given.copy_(torch.from_numpy(_as_transformers(numbers, name, architecture, config)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _blocks(draw: np.random.Generator, stored: Kind, shape: tuple[int, ...]) -> np.ndarray:
    """Return a matrix's bytes: random codes, or random numbers as gguf itself rounds them."""
    if stored not in _SCALES:
        numbers = draw.normal(0, 0.05, shape).astype(np.float32)
        return gguf.quants.quantize(numbers, stored)
    blocks = draw.integers(0, 256, gguf.quant_shape_to_byte_shape(shape, stored), np.uint8)
    rows = blocks.reshape(-1, gguf.GGML_QUANT_SIZES[stored][1])
    place, scales = _SCALES[stored]
    rows[:, place] = np.array(scales, np.float16).view(np.uint8)
    return blocks


def _as_transformers(numbers: np.ndarray, name: str, architecture: str, config: Any) -> np.ndarray:
    """Return a tensor as Transformers has it: rotary pairs apart, Gemma's norms less one."""
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        half = len(numbers) // heads // 2
        return numbers.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(numbers.shape).copy()
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return numbers - 1
    return numbers


def _write_keys(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    """Write what the converter writes of a configuration, in its order."""
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name("Elsewhere 1M Instruct")
    writer.add_finetune("Instruct")
    writer.add_basename("Elsewhere")
    writer.add_size_label("1M")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture in ("qwen3", "gemma3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    if architecture == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write_vocabulary(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Write byte-level BPE as the converter does."""
    inner = tokenizer.inner
    added = inner.get_added_tokens_decoder()
    ids = range(tokenizer.vocab_size)
    kinds = [gguf.TokenType.CONTROL if i in added else gguf.TokenType.NORMAL for i in ids]
    merges = json.loads(inner.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([str(inner.id_to_token(number)) for number in ids])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.end_of_text)
    writer.add_pad_token_id(tokenizer.end_of_text)
    writer.add_add_bos_token(False)
