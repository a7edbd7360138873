"""Formats of llama.cpp for each matrix, embeddings among them, in a file that is read back."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import wakeful
from evaluation.models import save_llama
from wakeful.errors import WakefulError
from wakeful.hf.gguf_out import packed_blocks
from wakeful.quantization.engines import LLAMA_CPP, VLLM
from wakeful.quantization.formats import matrix_bytes
from wakeful.quantization.schemes import Scheme
from wakeful.quantization.schemes.grids import Ggml

TYPES = {bits: gguf.GGMLQuantizationType[f"Q{bits}_0"] for bits in (4, 5, 8)}


@pytest.mark.parametrize("bits", TYPES)
def test_blocks_are_those_of_llama_cpp(bits: int) -> None:
    """gguf reads the packed blocks as the numbers of the grid, and rounds as the grid does."""
    torch.manual_seed(0)
    weight, grid = torch.randn(6, 96), Ggml(bits=bits)
    weight[1, 32:64] = 0
    scales = grid.compute_scales(weight)
    numbers = grid.fake_quantize(weight, scales)
    blocks = packed_blocks(numbers.numpy(), scales.scale.numpy(), TYPES[bits])
    assert blocks.nbytes == matrix_bytes(Scheme(weights=grid), *weight.shape)
    read = gguf.quants.dequantize(blocks, TYPES[bits])
    np.testing.assert_array_equal(read, numbers.numpy())
    theirs = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), TYPES[bits]), TYPES[bits])
    # Halves, and steps that float16 rounds, may go to the other side.
    assert np.abs(theirs - read).max() <= 1.01 * scales.scale.abs().max()
    assert np.isclose(theirs, read, atol=1e-3).mean() > 0.97
    with pytest.raises(WakefulError, match="ggml has 4, 5 or 8 bits"):
        Ggml(bits=6)


@pytest.mark.parametrize("target", [VLLM, LLAMA_CPP])
def test_bytes_of_formats_are_what_they_are_called(target) -> None:
    sizes = {name: 8 * matrix_bytes(each, 64, 256) / 64 / 256
             for name, each in target.schemes.items()}  # fmt: skip
    assert list(sizes.values()) == (
        [4.5, 5.5, 8.5] if target is LLAMA_CPP else [4.125, 4.25, 4.5, 8.0625]
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = save_llama(tmp_path / "llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
        tie_word_embeddings=True, vocab_size=258,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.slow
def test_a_file_for_llama_cpp_holds_what_was_measured(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("def return value layer for in range and the river went down " * 60)
    options = {
        "text": str(text), "length": 16, "num_sequences": 3, "device": "cpu",
        "calibration_sequences": 6, "for_": "llama.cpp", "bits": 6.0,
    }  # fmt: skip
    path = tmp_path / "small.gguf"
    result = wakeful.quantize(str(folder), save=str(path), **options)
    chosen = result.mixed_model
    assert chosen is not None
    assert chosen.bits <= 6
    assert "embed" in chosen.formats
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert types["token_embd.weight"] == chosen.formats["embed"]
    assert types["blk.1.ffn_down.weight"] == chosen.formats["blocks.1.mlp.down"]
    assert {name for name, kind in types.items() if kind == "F32"} == {
        *(f"blk.{n}.{norm}_norm.weight" for n in range(2) for norm in ("attn", "ffn")),
        "output_norm.weight",
    }
    tokens = torch.arange(20).view(1, 20)
    loaded = wakeful.load(path)
    torch.testing.assert_close(
        loaded.logits(tokens), result.model.logits(tokens), rtol=1e-4, atol=1e-4
    )
    data = sum(tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)
    assert data == chosen.bytes["mixed"]
    assert f"llama-server -m {path}" in str(result.report.steps)
    flags = tmp_path / "small.txt"
    result.save_model(flags)
    lines = flags.read_text("utf-8").splitlines()
    assert f"--token-embedding-type {types['token_embd.weight'].lower()}" in lines
    assert f"--tensor-type blk.0.attn_q.weight={types['blk.0.attn_q.weight'].lower()}" in lines
    for wrong, words in (
        ({"save": str(tmp_path / "folder")}, "for llama.cpp it is NAME.gguf"),
        ({"scheme": "w4a16"}, "llama.cpp has its own"),
    ):
        with pytest.raises(WakefulError, match=words):
            wakeful.quantize(str(folder), **options | wrong)
