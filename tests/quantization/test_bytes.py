"""What is written has the type its source has: quantized models, cured ones and exports."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import wakeful
from hf.gguf_models import TEXTS, decoder
from wakeful.cli import main
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.checkpoint_reader import INSTALL_SMOLLM2, narrow_exactly, smollm2_folder
from wakeful.hf.weights_out import export_decoder
from wakeful.quantization.compressed import file_bytes

TOKENS = torch.arange(24).view(1, 24) * 7 % 250
HEADERS = 20_000
"""Bytes that the names of tensors take in a file, at most."""


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder of a Llama in bfloat16."""
    folder = tmp_path_factory.mktemp("bytes") / "llama"
    tokenizer = Tokenizer.train(TEXTS, vocab_size=270)
    made = decoder(tokenizer.vocab_size, tied=False)
    export_decoder(made, folder, tokenizer=tokenizer, dtype=torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the quick dog " * 500)
    return str(file)


def types(folder: Path) -> dict[str, torch.dtype]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118


def expected_bytes(source: Path, layers: tuple[str, ...], bits: int) -> int:
    """Return the bytes of a folder in bfloat16 whose `layers` take so many bits a weight and a
    float32 scale an output channel.
    """
    size = 0
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.removesuffix(".weight") in layers:
            size += prod(tensor.shape) * bits // 8 + 4 * len(tensor)
        else:
            size += 2 * tensor.numel()
    return size


def test_a_tensor_is_narrowed_only_where_that_is_exact() -> None:
    exact = torch.tensor([1.0, -0.5, 2.0**120])
    assert narrow_exactly(exact, torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(narrow_exactly(exact, torch.bfloat16).float(), exact)
    for other in (torch.tensor([1 + 2**-9]), torch.tensor([torch.nan])):
        assert narrow_exactly(other, torch.bfloat16) is other
    assert narrow_exactly(exact, torch.float16) is exact  # which holds no 2¹²⁰
    assert narrow_exactly(exact, None) is narrow_exactly(exact, torch.float64) is exact
    codes = torch.zeros(2, dtype=torch.int8)
    assert narrow_exactly(codes, torch.bfloat16) is codes


@pytest.mark.slow
def test_the_type_of_the_files_is_remembered(half: Path, tmp_path: Path) -> None:
    model = wakeful.load(half)
    assert model.stored == torch.bfloat16
    assert next(model.module.parameters()).dtype == torch.float32
    assert model.as_decoder_model().stored == torch.bfloat16
    wakeful.export(half, tmp_path / "single", dtype="float32")
    assert wakeful.load(tmp_path / "single").stored == torch.float32
    assert wakeful.load(tmp_path / "single", dtype="bfloat16").stored == torch.bfloat16
    assert wakeful.load(model.module, tokenizer=model.tokenizer).stored is None


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "bits"), [("w8a8", 8), ("w4a16(weights=absmax(bits=4, "
                         "per='channel'))", 4)])  # fmt: skip
def test_a_quantized_model_takes_what_the_scheme_says(
    half: Path, text: str, scheme: str, bits: int, tmp_path: Path
) -> None:
    done = wakeful.quantize(half, scheme, save=tmp_path / "small", text=text)
    path = tmp_path / "small"
    expected = expected_bytes(half, done.layers, bits)
    assert 0 <= file_bytes(path) - expected < HEADERS
    assert file_bytes(path) < file_bytes(half)
    kept = {name: kind for name, kind in types(path).items() if "weight_" not in name}
    stayed = {name for name in types(half) if name.removesuffix(".weight") not in done.layers}
    assert stayed
    assert all(kept[name] == torch.bfloat16 for name in stayed)
    assert done.summary["bytes"] == file_bytes(half)
    assert done.summary["schemes"][0]["bytes"] == expected


@pytest.mark.slow
def test_compressed_tensors_are_read_with_the_scales_that_were_measured(
    half: Path, tmp_path: Path
) -> None:
    scheme = "w4a16(weights=absmax(bits=4, per='channel'))"
    done = wakeful.quantize(half, scheme, save=tmp_path / "q")
    small = done.model
    read = wakeful.load(tmp_path / "q")
    torch.testing.assert_close(read.logits(TOKENS), small.logits(TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_what_the_narrower_type_would_round_stays(half: Path, tmp_path: Path) -> None:
    tensors = load_file(half / "model.safetensors")
    tensors = {name: tensor.float() + 2**-12 * (name == "model.norm.weight")
               for name, tensor in tensors.items()}  # fmt: skip
    tensors = {name: narrow_exactly(tensor, torch.bfloat16) for name, tensor in tensors.items()}
    folder = tmp_path / "mixed"
    wakeful.export(half, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = wakeful.load(folder)
    assert model.stored == torch.bfloat16
    done = wakeful.quantize(model, "fp8", save=tmp_path / "small")
    kinds = types(tmp_path / "small")
    assert kinds.pop("model.norm.weight") == torch.float32
    assert kinds["model.embed_tokens.weight"] == torch.bfloat16
    again = wakeful.load(tmp_path / "small").logits(TOKENS)
    torch.testing.assert_close(again, done.model.logits(TOKENS), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_an_export_has_the_type_of_its_source(half: Path, tmp_path: Path) -> None:
    wakeful.export(half, tmp_path / "same")
    wakeful.export(half, tmp_path / "single", dtype="float32")
    assert set(types(tmp_path / "same").values()) == {torch.bfloat16}
    assert set(types(tmp_path / "single").values()) == {torch.float32}
    wakeful.export(wakeful.load(half), tmp_path / "loaded")
    for name, tensor in load_file(half / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "loaded/model.safetensors")[name], tensor)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cures", [{"rotate": "hadamard"}, {"rotate": "hadamard", "prefix": "auto"}]
)
def test_what_is_measured_of_a_cured_model_is_what_is_written(
    half: Path, text: str, cures: dict[str, Any], tmp_path: Path
) -> None:
    given = {**cures, "text": text, "length": 32}
    cured = wakeful.cure(half, **given, out=tmp_path / "cured")
    assert "rounded to bfloat16, the type written" in dict(cured.done)["Weights"]
    assert set(types(tmp_path / "cured").values()) == {torch.bfloat16}
    again = wakeful.load(tmp_path / "cured").logits(TOKENS)
    torch.testing.assert_close(again, cured.model.logits(TOKENS), rtol=1e-4, atol=1e-4)
    if "prefix" not in cures:  # which no stock architecture holds
        wakeful.quantize(cured.model, "w8a8", save=tmp_path / "small")
        assert file_bytes(tmp_path / "small") < file_bytes(half)

    whole = wakeful.cure(half, **given, stored="float32", out=tmp_path / "whole")
    assert "Weights" not in dict(whole.done)
    assert set(types(tmp_path / "whole").values()) == {torch.float32}
    assert whole.difference.kl < cured.difference.kl


@pytest.mark.slow
def test_an_option_tells_the_type_that_is_written(half: Path, text: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    asked = ["--rotate", "hadamard", "--stored", "float16", "--text", text, "--length", "32"]
    assert main(["cure", str(half), *asked, "--out", out]) == 0
    assert set(types(tmp_path / "out").values()) == {torch.float16}


@pytest.mark.long
@pytest.mark.parametrize(("scheme", "bits"), [("w8a8", 8), ("w4a16(weights=absmax(bits=4, "
                         "per='channel'))", 4)])  # fmt: skip
def test_smollm2_in_bfloat16_shrinks_by_what_the_scheme_says(
    scheme: str, bits: int, tmp_path: Path
) -> None:
    try:
        smollm2_folder()
    except WakefulError:
        pytest.skip(INSTALL_SMOLLM2)
    half, small = tmp_path / "half", tmp_path / "small"
    wakeful.export("smollm2", half, dtype="bfloat16")
    done = wakeful.quantize(half, scheme, save=small)
    expected = expected_bytes(half, done.layers, bits)
    assert abs(file_bytes(small) - expected) < 100_000
    assert file_bytes(small) / file_bytes(half) < (0.61 if bits == 8 else 0.42)
