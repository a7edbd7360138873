"""A GGUF file holds the model: read back by gguf, by Transformers and by us."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Inner
from tokenizers import models as kinds
from tokenizers import pre_tokenizers

import wakeful
from wakeful.config.model import ModelConfig
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.gguf_out import export_gguf
from wakeful.model.decoder import Decoder

SHAPE = {
    "max_length": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "width": 64,
    "mlp_width": 96,
}  # fmt: skip
GPT2 = {
    "num_kv_heads": 4, "mlp_width": 256, "norm": "layernorm", "mlp": "gelu", "bias": True,
    "positions": "learned", "tied": True, "max_length": 1024,  # the only one Transformers reads
}  # fmt: skip
ARCHITECTURES = {
    "llama": {},
    "qwen2": {"attention_bias": "qkv", "tied": True},
    "qwen3": {"qk_norm": True, "head_width": 128},
    "gpt2": GPT2,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a quick brown fox jumps over a lazy dog " * 40], vocab_size=270)


def decoder(tokenizer: Tokenizer, **changes: object) -> Decoder:
    torch.manual_seed(0)
    config = {**SHAPE, "vocab_size": tokenizer.vocab_size, **changes}
    made = Decoder(ModelConfig(**config)).eval()  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


@torch.no_grad()
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_transformers_reads_the_same_model(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    made = decoder(tokenizer, **ARCHITECTURES[kind])
    path = tmp_path / "model.gguf"
    assert export_gguf(made, path, tokenizer=tokenizer, storage="f32") == kind
    read = wakeful.load(path)
    tokens = torch.arange(20).view(1, 20)
    torch.testing.assert_close(read.logits(tokens), made(tokens), rtol=1e-4, atol=1e-4)
    text = "a quick brown dog, twice"
    assert read.plain(text) == tokenizer.encode(text)
    assert read.decode(tokenizer.encode(text)) == text


@torch.no_grad()
@pytest.mark.parametrize(("storage", "bits"), [("f16", 16.0), ("q8_0", 8.5), ("q4_0", 4.5)])
def test_matrices_are_stored_as_asked(
    storage: str, bits: float, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    made = decoder(tokenizer)
    path = tmp_path / "model.gguf"
    export_gguf(made, path, tokenizer=tokenizer, storage=storage)  # pyright: ignore
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    down = tensors["blk.0.ffn_down.weight"]
    assert down.n_bytes * 8 / down.n_elements == bits
    assert tensors["blk.0.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    expected = {"f16": "F16", "q8_0": "Q8_0", "q4_0": "Q8_0"}[storage]
    assert tensors["token_embd.weight"].tensor_type.name == expected
    numbers = gguf.quants.dequantize(down.data, down.tensor_type)
    weight = made.blocks[0].mlp.down.weight.numpy()
    step = {"f16": 1e-3, "q8_0": 1 / 127, "q4_0": 1 / 7}[storage]
    assert np.abs(numbers - weight).max() <= step * np.abs(weight).max()
    loss = (
        wakeful.load(path).logits(torch.arange(20).view(1, 20)) - made(torch.arange(20).view(1, 20))
    ).std()
    assert (
        loss
        < {"f16": 1e-2, "q8_0": 0.1, "q4_0": 1.0}[storage]
        * made(torch.arange(20).view(1, 20)).std()
    )


def test_rows_that_are_not_whole_blocks_stay_halves(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    export_gguf(decoder(tokenizer, mlp_width=40), path, tokenizer=tokenizer, storage="q8_0")
    types = {each.name: each.tensor_type.name for each in gguf.GGUFReader(path).tensors}
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert types["blk.0.ffn_up.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"normalizer": "softmax1"}, "wakeful"),
        ({"rope": "linear(factor=2.0)"}, "model.rope"),
        ({"attention_bias": "all"}, "attention_bias"),
        ({"qk_norm": True, "local_layers": (0,), "local_theta": 10_000.0, "window": 5},
         "model.local_layers"),
        ({**GPT2, "mlp": "gelu_exact", "positions": "rotary", "parallel": True, "tied": False},
         "gpt_neox"),
    ],
)  # fmt: skip
def test_what_a_file_cannot_hold_is_refused(
    changes: dict[str, object], word: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(WakefulError, match=word):
        export_gguf(decoder(tokenizer, **changes), tmp_path / "m.gguf", tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_stays(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    with pytest.raises(WakefulError, match="exists"):
        export_gguf(decoder(tokenizer), path, tokenizer=tokenizer)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), "gpt-2"),
        (
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            ),
            "smollm",
        ),
        (pre_tokenizers.Whitespace(), ""),
    ],
)
def test_how_text_is_cut_is_named(
    steps: pre_tokenizers.PreTokenizer, name: str, tmp_path: Path
) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: number for number, letter in enumerate([*letters, "<end>"])}
    inner = Inner(kinds.BPE(vocab=ids, merges=[]))
    inner.pre_tokenizer = steps
    made = Tokenizer(inner, end_of_text="<end>")
    path = tmp_path / "m.gguf"
    if not name:
        with pytest.raises(WakefulError, match="cuts text"):
            export_gguf(decoder(made), path, tokenizer=made)
        return
    export_gguf(decoder(made), path, tokenizer=made)
    field = gguf.GGUFReader(path).fields["tokenizer.ggml.pre"]
    assert field.contents() == name
