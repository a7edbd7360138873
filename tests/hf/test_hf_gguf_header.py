"""GGUF headers: read right, and never believed beyond the file's own bytes."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from wakeful.errors import WakefulError
from wakeful.hf.gguf_header import read_gguf_header
from wakeful.loading.load import load, read_decoder


def write(path: Path, *, layers: int = 2, width: int = 8, hidden: int = 12) -> Path:
    """Write a GGUF file with a few tensors of different types and every kind of value."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_bool("flag", True)
    writer.add_int64("negative", -3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "é"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    noise = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", noise.standard_normal((6, width)).astype(np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", noise.standard_normal((hidden, width)).astype("f2"))
    packed = np.zeros((2, 18 * 2), np.uint8)  # two rows of two blocks of 32 numbers
    writer.add_tensor("q", packed, raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_reads_what_the_reference_reader_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    header = read_gguf_header(path)
    reference = GGUFReader(path)
    assert {name: (t.shape, t.num_bytes) for name, t in header.tensors.items()} == {
        t.name: (tuple(t.shape.tolist()), t.n_bytes) for t in reference.tensors
    }
    assert header.values["llama.block_count"] == 2
    assert header.values["llama.rope.freq_base"] == 1e4
    assert (header.values["flag"], header.values["negative"]) == (True, -3)
    assert header.array_lengths == {"tokenizer.ggml.tokens": 3, "tokenizer.ggml.scores": 2}


@pytest.mark.parametrize("layers", [0, 4, 2**31 - 1])
def test_a_depth_its_tensors_cannot_have_is_refused(layers: int, tmp_path: Path) -> None:
    with pytest.raises(WakefulError, match=r"block_count' = .* does not fit its tensors"):
        read_gguf_header(write(tmp_path / "m.gguf", layers=layers))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as GGUF"),
        (b"GGU", "does not begin with GGUF"),
        (b"PK\x03\x04" + bytes(60), "does not begin with GGUF"),
        (b"GGUF\x03", "4 bytes are announced from byte"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "announced"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "announced"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60), "announced"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**60), "announced"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "an array of"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "has 9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 5, 0, 0), "cut off or damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 0, 0, 0), "cannot have the"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 5, 99, 0), "unknown type 99"),
    ],
)
def test_what_is_unsound_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(WakefulError, match=message):
        read_gguf_header(path)
    with pytest.raises(WakefulError, match=message):
        load(str(path), device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(WakefulError, match=message):
        read_decoder(path)


@pytest.mark.slow
@settings(max_examples=300, deadline=2000, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_damage_crashes_or_hangs_the_reader(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if not path.exists():
        write(path)
        (tmp_path / "sound").write_bytes(path.read_bytes())
    content = bytearray((tmp_path / "sound").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, min(len(content), 600) - 1))
        piece = data.draw(st.sampled_from([b"\xff" * 8, b"\x00" * 8, b"\x7f", b"\x01\x00", b""]))
        piece = piece or data.draw(st.binary(min_size=1, max_size=8))
        content[place : place + len(piece)] = piece
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        header = read_gguf_header(path)
    except WakefulError as error:
        message = str(error)
    else:
        message = ""
        assert sum(t.num_bytes for t in header.tensors.values()) <= 3 * len(content)
    assert "\n" not in message


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path / "m", state_dict=state)
    with pytest.raises(WakefulError, match=r"has no tensor model.layers.1.mlp.up_proj.weight"):
        load(str(tmp_path / "m"), device=torch.device("cpu"), dtype=torch.float32)
