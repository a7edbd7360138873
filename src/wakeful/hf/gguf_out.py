"""Weights out as one GGUF file, which llama.cpp and what is built on it run.

Stock architectures only: a file says which one it is and holds no code. Names of tensors and
metadata are the package gguf's; queries and keys of a Llama are reordered as llama.cpp wants them,
whose rotary embedding pairs neighboring channels.
"""

import json
from pathlib import Path
from typing import Literal, get_args

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType

import wakeful
from wakeful.config.model import ModelConfig
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.weights_out import describe, refuse_existing, tensors_of
from wakeful.model.decoder import Decoder
from wakeful.model.fold import folded
from wakeful.runs.run import disk_errors, replaced

Storage = Literal["f32", "f16", "q8_0", "q4_0"]
"""What matrices are stored as; scalars and vectors are float32 always."""
_TYPES = {
    "f32": (GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
_BLOCK = 32
"""Numbers that share a scale in Q8_0 and Q4_0."""
_ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3,
    "gpt2": MODEL_ARCH.GPT2,
}  # fmt: skip
_SPLITS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
}
"""What llama.cpp calls the way of cutting text that a tokenizer's pattern is."""


def export_gguf(
    decoder: Decoder,
    path: str | Path,
    *,
    tokenizer: Tokenizer,
    storage: Storage = "f16",
    name: str = "",
) -> str:
    """Write a decoder that is a stock architecture to a GGUF file; return the architecture.

    In "q8_0" and "q4_0" matrices have a scale every 32 inputs, as the package gguf rounds them; one
    whose rows are not whole blocks stays float16, and "q4_0" keeps embedding and head in Q8_0.

    Raises:
        WakefulError: the file exists or cannot be written; the decoder is of no architecture that
            GGUF files here can hold; or its tokenizer cuts text in a way that llama.cpp has no name
            for.
    """
    if storage not in get_args(Storage):
        raise WakefulError(f"gguf must be one of {', '.join(get_args(Storage))}, got {storage!r}")
    path = Path(path)
    refuse_existing(path)
    decoder = folded(decoder)
    kind = describe(decoder.config)[0]
    _check(kind, decoder.config)
    vocabulary = _vocabulary(tokenizer, decoder.config.vocab_size)
    pattern = _pattern(tokenizer)
    architecture = _ARCHITECTURES[kind]
    with disk_errors(path), replaced(path) as part:
        writer = GGUFWriter(part, gguf.MODEL_ARCH_NAMES[architecture])
        _describe(writer, decoder.config, storage, name or path.stem)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pattern)
        writer.add_token_list([token for token, _ in vocabulary])
        writer.add_token_types([kind for _, kind in vocabulary])
        writer.add_token_merges(_merges(tokenizer))
        _special(writer, tokenizer)
        _write(writer, decoder, kind, architecture, storage)
    return kind


def _check(kind: str, config: ModelConfig) -> None:
    if kind not in _ARCHITECTURES:
        raise WakefulError(
            f"a GGUF file holds one of {', '.join(_ARCHITECTURES)}, and this model is a {kind}; "
            "export a folder instead"
        )
    if kind == "llama" and (config.qkv_bias or config.bias):
        raise WakefulError(
            "model.attention_bias: Transformers reads no biases of a Llama from GGUF files; export "
            "a folder instead"
        )
    if config.local_layers:
        raise WakefulError(
            f"model.local_layers = {list(config.local_layers)}: layers of other positions or "
            "windows are not written to GGUF files yet; export a folder instead"
        )
    if config.positions == "rotary" and config.rope != "plain":
        raise WakefulError(
            f"model.rope = {config.rope}: scaled rotary embeddings are not written to GGUF files "
            "yet; export a folder instead"
        )


def _describe(writer: GGUFWriter, config: ModelConfig, storage: Storage, name: str) -> None:
    shape = config.shape
    writer.add_name(name)
    writer.add_description(f"written by wakeful {wakeful.__version__}")
    writer.add_file_type(_TYPES[storage][1])
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.norm == "layernorm":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.positions == "rotary":
        writer.add_rope_dimension_count(shape.head_width)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_key_length(shape.head_width)
        writer.add_value_length(shape.head_width)


def _write(
    writer: GGUFWriter, decoder: Decoder, kind: str, architecture: MODEL_ARCH, storage: Storage
) -> None:
    config, shape = decoder.config, decoder.config.shape
    names = gguf.get_tensor_name_map(architecture, config.num_layers)
    for theirs, tensor in tensors_of(decoder, kind, torch.float32).items():
        found = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert found is not None, theirs
        array = tensor.numpy()
        if kind == "llama" and theirs.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_heads if "q_proj" in theirs else shape.num_kv_heads
            array = _paired(array, heads)
        if kind == "gpt2" and array.ndim == 2 and ".h." in theirs:
            array = array.T  # which Conv1D stores (in, out)
        stored = _storage(array, storage, of_tokens=found.startswith(("token_embd", "output.")))
        array = np.ascontiguousarray(array)
        writer.add_tensor(found, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put the channels of each head that rotate together, i and i + d/2, beside each other."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _storage(array: np.ndarray, storage: Storage, *, of_tokens: bool) -> GGMLQuantizationType:
    if array.ndim == 1:
        return GGMLQuantizationType.F32
    if storage in ("q8_0", "q4_0"):
        if array.shape[-1] % _BLOCK:
            return GGMLQuantizationType.F16
        return _TYPES["q8_0" if of_tokens else storage][0]
    return _TYPES[storage][0]


def _vocabulary(tokenizer: Tokenizer, size: int) -> list[tuple[str, TokenType]]:
    """Return every id's token and kind; ids that the tokenizer leaves out are filled up."""
    inner = tokenizer.inner
    added = inner.get_added_tokens_decoder()
    found: list[tuple[str, TokenType]] = []
    for number in range(size):
        token = inner.id_to_token(number)
        if token is None:
            found.append((f"[PAD{number}]", TokenType.UNUSED))
        elif number in added:
            special = added[number].special
            found.append((token, TokenType.CONTROL if special else TokenType.USER_DEFINED))
        else:
            found.append((token, TokenType.NORMAL))
    return found


def _merges(tokenizer: Tokenizer) -> list[str]:
    merges = json.loads(tokenizer.inner.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _pattern(tokenizer: Tokenizer) -> str:
    """Return llama.cpp's name for how the tokenizer cuts text before it merges.

    Raises:
        WakefulError: it has none, or the tokenizer is not byte-level BPE.
    """
    table = json.loads(tokenizer.inner.to_str())
    steps = table.get("pre_tokenizer") or {}
    parts = steps.get("pretokenizers", [steps]) if steps else []
    kinds = [part.get("type") for part in parts]
    if table["model"].get("type") == "BPE" and kinds and kinds[-1] == "ByteLevel":
        own = parts[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and own:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and own and parts[0].get("individual_digits"):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not own:
            named = _SPLITS.get(parts[0].get("pattern", {}).get("Regex", ""))
            if named is not None:
                return named
    raise WakefulError(
        "the tokenizer cuts text in a way that GGUF files have no name for here (byte-level BPE as "
        "GPT-2's, SmolLM's, Llama 3's and Qwen2's are known); export a folder instead"
    )


def _special(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    writer.add_eos_token_id(tokenizer.end_of_text)
    if tokenizer.bos is not None:
        writer.add_bos_token_id(tokenizer.bos)
    if tokenizer.pad is not None:
        writer.add_pad_token_id(tokenizer.pad)
    writer.add_add_bos_token(tokenizer.adds_bos)
    template = tokenizer.chat_template
    if template:
        writer.add_chat_template(template)
