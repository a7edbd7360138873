"""GGUF files that other programs wrote: every verb takes them, and reads the numbers they hold."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import wakeful
from hf.foreign_gguf import CONFIGS, write_foreign
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.checkpoint_reader import quantization_method
from wakeful.hf.weights_in import convert_hf_config
from wakeful.loading.load import read_decoder
from wakeful.loading.model import Model

TOKENS = torch.randint(250, (2, 100), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a quick brown fox jumps over a lazy dog " * 40], vocab_size=270)


@pytest.fixture
def text(tmp_path: Path) -> str:
    words = random.Random(0).choices(["a", "quick", "brown fox", "jumps over", "lazy"], k=900)
    (tmp_path / "text.txt").write_text(" ".join(words), "utf-8")
    return str(tmp_path / "text.txt")


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(TOKENS)
    return getattr(found, "logits", found)


def agrees(read: Model, expected: torch.Tensor) -> None:
    torch.testing.assert_close(read.logits(TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_it_is_read_cured_and_exported(
    architecture: str, tokenizer: Tokenizer, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "elsewhere-q4_k_m.gguf"
    expected = logits_of(write_foreign(path, architecture, tokenizer))
    assert float(expected.std()) > 0.05  # they are worth comparing
    read = wakeful.load(path)
    agrees(read, expected)
    assert quantization_method(read.module.config) == ""  # pyright: ignore[reportArgumentType]
    assert (read.context, read.end) == (128, tokenizer.end_of_text)
    assert read.encode_plain("a quick dog") == tokenizer.encode("a quick dog")
    parts = [read.encode_plain(text) for text in ("e\u0301", "\u00e9")]
    assert (parts[0] == parts[1]) == architecture.startswith("qwen")  # whose own have NFC
    agrees(read_decoder(path), expected)
    folder, file = tmp_path / "folder", tmp_path / "again.gguf"
    stock = "gemma3_text" if architecture == "gemma3" else architecture
    assert wakeful.export(path, folder) == stock
    agrees(wakeful.load(folder), expected)
    wakeful.export(path, file, gguf="f32")
    agrees(wakeful.load(file), expected)
    given = {"text": text, "num_sequences": 2, "length": 32, "device": "cpu"}
    # Norms behind a sublayer let the stream of a Gemma 3 not be turned.
    turned = {"rotate_values": True} if architecture == "gemma3" else {"rotate": "hadamard"}
    cured = wakeful.cure(path, out=str(tmp_path / "cured"), **turned, **given)
    agrees(cured.model, expected)
    agrees(wakeful.load(tmp_path / "cured"), expected)


def test_every_other_verb_takes_it(tokenizer: Tokenizer, text: str, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere-q4_k_m.gguf"
    write_foreign(path, "llama", tokenizer)
    given = {"text": text, "device": "cpu"}
    seen = wakeful.diagnose(path, num_sequences=2, length=32, **given)
    assert seen.summary["models"][0]["loss"] > 0
    small = wakeful.quantize(
        path, "w4a16", num_sequences=2, length=32, save=str(tmp_path / "small"),
        **given,
    )  # fmt: skip
    read = wakeful.load(tmp_path / "small")
    expected = small.model.logits(TOKENS).detach()
    assert float((read.logits(TOKENS).detach() - expected).norm() / expected.norm()) < 1e-4
    assert "".join(wakeful.generate(path, "a quick", num_tokens=3, temperature=0.0))
    heir = wakeful.inherit(
        path, layers=1, heal={"by": "none"}, out=str(tmp_path / "heir"), length=32,
        **given,
    )  # fmt: skip
    assert heir.untrained is not None
    agrees(wakeful.load(tmp_path / "heir"), heir.model.logits(TOKENS))
    healed = wakeful.inherit(
        path, layers=1, steps=2, out=str(tmp_path / "healed"), length=32,
        **given,
    )  # fmt: skip
    assert len(healed.model.blocks) == 1


def test_a_model_that_transformers_read_is_taken_too(tokenizer: Tokenizer, tmp_path: Path) -> None:
    expected = logits_of(write_foreign(tmp_path / "there.gguf", "qwen3", tokenizer))
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="there.gguf", dtype=torch.float32
    )
    decoder = wakeful.load(model, tokenizer=tokenizer).decoder()
    torch.testing.assert_close(logits_of(decoder), expected, rtol=1e-4, atol=1e-4)
    model.config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(WakefulError, match="quant_method = 'awq'"):
        convert_hf_config(model.config)
