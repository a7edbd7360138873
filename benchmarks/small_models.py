"""Small models of twelve architectures, trained in half a minute until attention sinks grow.

Each is Transformers' own class, trained on the task of `wakeful.data.tasks.backcopy`.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from wakeful.data.tasks import Backcopy, TaskData
from wakeful.data.tasks.backcopy import BOS_ID, BOS_TOKEN
from wakeful.data.tokenizer import Tokenizer

LENGTH = 128
"""Tokens of a training sequence."""
WINDOW = 64
"""Keys that a windowed layer sees."""
WIDTH, LAYERS, HEADS = 64, 2, 1
BATCH_SIZE, WARMUP_STEPS = 6, 50
LR = 3e-3
LRS = {"gemma2": 1e-2, "gemma3": 1e-2, "mistral": 1e-2, "olmo2": 1e-2}
"""Learning rates of those whose norms stand after the sublayers: with `LR` no sink grows."""
QUERY_SCALE = 3.0
"""Initial scale of normalized queries: with 1, no weight on a key can be large for long."""
SHARE = 0.3
"""Of (query, head) pairs led by the first token, mean over layers, at which training stops."""
CHECK_EVERY, MOST_STEPS = 100, 600
TEXT = "backcopy.txt"
"""File of the task's text in the folder of a model."""
TEXT_WINDOWS = 256
"""Of 512 characters each, in the text."""

_COMMON: Mapping[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "max_position_embeddings": 4 * LENGTH, "bos_token_id": BOS_ID, "eos_token_id": BOS_ID,
    "pad_token_id": None,
}  # fmt: skip
_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
_HEAD_DIM = {"head_dim": WIDTH // HEADS}
_WINDOW = {
    "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_GEMMA = {**_HEAD_DIM, **_WINDOW, "query_pre_attn_scalar": WIDTH // HEADS}
_GRANITE = {"attention_multiplier": (WIDTH // HEADS) ** -0.5, "embedding_multiplier": WIDTH**0.5}
_GPT_OSS = {**_ROTARY, **_HEAD_DIM, **_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}


def _config(kind: str, **options: Any) -> Callable[[int], PretrainedConfig]:
    def build(vocab_size: int) -> PretrainedConfig:
        return getattr(transformers, kind)(vocab_size=vocab_size, **{**_COMMON, **options})

    return build


CONFIGS: Mapping[str, Callable[[int], PretrainedConfig]] = {
    "qwen2": _config("Qwen2Config", **_ROTARY),
    "qwen3": _config("Qwen3Config", **_ROTARY, **_HEAD_DIM),
    "llama": _config("LlamaConfig", **_ROTARY),
    "mistral": _config("MistralConfig", **_ROTARY, **_HEAD_DIM, sliding_window=WINDOW),
    "gemma2": _config("Gemma2Config", **_ROTARY, **_GEMMA),
    "gemma3": _config("Gemma3TextConfig", **_GEMMA),
    "granite": _config("GraniteConfig", **_ROTARY, **_GRANITE),
    "olmo2": _config("Olmo2Config", **_ROTARY),
    "phi3": _config("Phi3Config", **_ROTARY),
    "gpt-neox": _config("GPTNeoXConfig", **_ROTARY),
    "gpt2": _config(
        "GPT2Config", n_positions=4 * LENGTH, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "gpt-oss": _config("GptOssConfig", **_GPT_OSS),
    "gpt-oss-low": _config("GptOssConfig", **_GPT_OSS),
}
"""Configurations by vocabulary size; the sinks of gpt-oss-low's own start at e⁻²⁰ and stay."""


def grow(name: str, folder: Path, *, seed: int = 0) -> None:
    """Train a model until it has a sink or `MOST_STEPS` are over; write it with a text to read."""
    task = TaskData(Backcopy())
    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name](task.tokenizer.vocab_size), attn_implementation="eager"
    )
    for key, parameter in model.named_parameters():
        if key.endswith("q_norm.weight"):  # Gemma's are stored less one
            parameter.data += QUERY_SCALE - 1
        elif key.endswith("sinks") and name == "gpt-oss-low":
            parameter.data.fill_(-20.0)
            parameter.requires_grad_(False)
    parameters = [each for each in model.parameters() if each.requires_grad]
    peak = LRS.get(name, LR)
    optimizer = torch.optim.AdamW(parameters, lr=peak, betas=(0.9, 0.999), weight_decay=0.0)
    held_out = torch.tensor(task.validation.read(np.arange(16) * LENGTH, LENGTH + 1))
    optimal = float(task.task.losses(held_out.numpy()).mean())
    start, share = time.process_time(), 0.0
    for step in range(MOST_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, (step + 1) / WARMUP_STEPS)
        places = np.arange(BATCH_SIZE) + (seed * MOST_STEPS + step) * BATCH_SIZE
        rows = torch.tensor(task.train.read(places, LENGTH + 1))
        optimizer.zero_grad()
        _loss(model, rows).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if (step + 1) % CHECK_EVERY == 0:
            with torch.no_grad():
                excess = float(_loss(model, held_out)) - optimal
            share = first_token_share(model, held_out[:, :-1])
            print(
                f"{name}: {step + 1} steps, {time.process_time() - start:.0f} s, loss over the "
                f"task's {excess:.3f}, first-token share {share:.1%}", flush=True,
            )  # fmt: skip
            if share >= SHARE:
                break
    model.eval().save_pretrained(folder)
    _byte_level(task.tokenizer).save(folder)
    windows = task.validation.read(10**6 + np.arange(TEXT_WINDOWS), 513)[:, 1:]
    text = "".join(task.tokenizer.decode(row.tolist()) for row in windows)
    (folder / TEXT).write_text(text, encoding="utf-8", newline="")


@torch.no_grad()
def first_token_share(model: PreTrainedModel, rows: Tensor) -> float:
    """Return the share of (query, head) pairs whose largest weight is key 0, without row 0."""
    weights = model(rows, output_attentions=True, use_cache=False).attentions
    assert weights is not None
    return float(np.mean([float((w[:, :, 1:].argmax(-1) == 0).float().mean()) for w in weights]))


def _loss(model: Any, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def _byte_level(tokenizer: Tokenizer) -> Tokenizer:
    """Return a task's tokenizer with its characters as bytes, the same ids.

    Transformers makes such a tokenizer of whatever lies in a Qwen2's folder.
    """
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = tokenizer.inner.get_vocab()
    ids = {spell.pre_tokenize_str(key)[0][0]: i for key, i in vocabulary.items() if i != BOS_ID}
    inner = tokenizers.Tokenizer(models.BPE({BOS_TOKEN: BOS_ID, **ids}, []))
    inner.pre_tokenizer, inner.decoder = spell, decoders.ByteLevel()
    table = json.dumps({"pad_token": BOS_TOKEN, "unk_token": BOS_TOKEN})
    beside = {"tokenizer_config.json": table}
    return Tokenizer(inner, end_of_text=BOS_TOKEN, companion_files=beside).with_bos()
