"""Tiny models with a tokenizer of bytes, and what a user would give them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from wakeful.loading.load import load
from wakeful.loading.model import Model

CPU = torch.device("cpu")


def save_llama(folder: Path, *, seed: int = 0, bos: bool = True) -> Path:
    """Save a random Llama of 64 tokens' context and a tokenizer of bytes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=258, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, "<eos>", "<bos>"]
    inner = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"bos_token": "<bos>"} if bos else {}
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", **special).save_pretrained(
        folder
    )
    return folder


def loaded_llama(folder: Path, dtype: torch.dtype = torch.float64, **over: Any) -> Model:
    return load(str(save_llama(folder, **over)), device=CPU, dtype=dtype)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "llama")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


LAMBADA = [
    {"text": "the cat sat on the mat"},
    {"text": "a much longer context that goes on before it ends with a word"},
    {"text": "one two"},
    {"text": "très bien, said the Frenchman; and the answer was naïve"},
    {"text": "again the cat sat on the mat"},
]
CHOICES: list[dict[str, Any]] = [
    {"question": "which is a color?", "choices": ["red", "a bird"], "answer": 0},
    {"context": "She went to", "choices": ["town", "and", "the very long way home"], "answer": 2},
    {"goal": "open a tin", "sol1": "use a tin opener", "sol2": "use a spoon", "label": 1},
    {"context": "One {{ template }} or", "choices": ["{{ other }}", "none", "x"], "answer": 1},
]
