"""What quantized models take in memory and in files, and what lies beside them there."""

import json
from pathlib import Path

import pytest
import torch
from test_convert import gpt2, llama
from transformers import AutoModelForCausalLM, AutoTokenizer

import wakeful
from evaluation.models import save_llama
from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.quantization import NAMED, parse_scheme, quantize_module, quantized_layers
from wakeful.quantization.compressed import file_bytes, save_compressed, state_bytes
from wakeful.quantization.measure import measure_damage


def test_what_a_model_takes_is_what_the_grids_say() -> None:
    model = tiny_decoder(dtype=torch.float32, width=64, mlp_width=160, head_width=16).eval()
    layers = quantized_layers(quantize_module(model, "fine")).values()
    linear = sum(layer.in_features * layer.out_features for layer in layers)
    channels = sum(layer.out_features for layer in layers)
    full = state_bytes(model)
    for scheme, expected in (
        ("fine", full - 3 * linear + 4 * channels),
        ("moderate", full - 3 * linear + 4 * 29),
        ("w4", full - 4 * linear + linear // 2 + 8 * channels),
    ):
        assert state_bytes(quantize_module(model, scheme)) == expected
    assert state_bytes(tiny_decoder(tied=True)) < state_bytes(tiny_decoder())


def test_the_file_takes_what_the_model_takes(tmp_path: Path) -> None:
    small = quantize_module(llama(), "fine")
    save_compressed(small, tmp_path / "small", lambda _: None)
    size = state_bytes(small)
    assert size < file_bytes(tmp_path / "small") < size + 20_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme",
    [
        *(name for name, scheme in NAMED.items() if scheme.weights is not None),
        "coarse(scales='static')", "smoothquant(scales='static')", "w4a16(method=gptq)",
        "nvfp4(method=gptq)", "w4a16(method=gptq(weighting='none'))",
    ],
)  # fmt: skip
def test_matrices_of_zeros_stay_zeros(scheme: str) -> None:
    model = tiny_decoder(dtype=torch.float32).eval()
    block = model.blocks[1]
    for layer in (block.attention.value, block.attention.out, block.mlp.up, block.mlp.down):
        layer.weight.data.zero_()
    known = parse_scheme(scheme)
    text = [some_tokens(2, 9)] if known.calibrated else []
    small = quantize_module(model, known, calibration=text)
    layers = quantized_layers(small)
    for name in ("attention.value", "attention.out", "mlp.up", "mlp.down"):
        assert not layers[f"blocks.1.{name}"].dequantize().any()
    found = measure_damage("m", model, {"q": small}, [some_tokens(1, 9)]).layers
    for kind in ("attention.value", "attention.out", "mlp.up", "mlp.down"):
        errors = found.filter(layer=1, kind=kind, metric="relative_error")["value"]
        assert errors.to_list() == [0.0, 0.0, 0.0]


def test_a_full_precision_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(WakefulError, match="not quantized: nothing to save"):
        save_compressed(gpt2(), tmp_path / "small", lambda _: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_saved_model_has_what_lies_beside_its_tokenizer(tmp_path: Path) -> None:
    source, folder = save_llama(tmp_path / "llama"), tmp_path / "q"
    theirs = AutoTokenizer.from_pretrained(source)
    theirs.add_special_tokens({"pad_token": "!", "unk_token": "?"})
    theirs.chat_template = "{{ messages[0]['content'] }}!"
    theirs.save_pretrained(source)
    said = {"do_sample": True, "top_k": 7, "temperature": 0.5, "eos_token_id": [3, 256]}
    (source / "generation_config.json").write_text(json.dumps(said))
    wakeful.quantize(str(source), "fine", save=str(folder))
    again = AutoTokenizer.from_pretrained(folder)
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template"):
        assert getattr(again, name) == getattr(theirs, name), name
    assert again("a b").input_ids == theirs("a b").input_ids
    for model in (AutoModelForCausalLM.from_pretrained(folder), wakeful.load(folder).module):
        generation = model.generation_config
        assert {name: getattr(generation, name) for name in said} == said
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(WakefulError, match=r"generation_config.json is damaged"):
        wakeful.load(folder)
