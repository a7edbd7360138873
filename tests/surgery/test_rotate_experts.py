"""A rotated mixture of experts is the same function, and no channel of its stream stands out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import wakeful
from quantization.test_experts import FEW, ROUTED, TOKENS, model_of
from verbs.test_diagnose import save_tokenizer
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.weights_out import save_stock
from wakeful.probes import exact
from wakeful.surgery import rotate_experts


def hidden(model: PreTrainedModel) -> torch.Tensor:
    return model(TOKENS, output_hidden_states=True).hidden_states[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rotation", ["hadamard", "haar"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
@torch.inference_mode()
def test_the_logits_stay(name: str, rotation: str, tied: bool) -> None:
    model = model_of(name, tie_word_embeddings=tied)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if "norm" in part:
                parameter.uniform_(0.5, 1.5)
        model.get_input_embeddings().weight[:, 5] *= 30  # pyright: ignore
    before = {part: tensor.clone() for part, tensor in model.state_dict().items()}
    turned = rotate_experts(model, rotation)
    torch.testing.assert_close(turned(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(before[part], now) for part, now in model.state_dict().items())
    assert exact.kurtosis(hidden(turned)).mean() < 0.5 * exact.kurtosis(hidden(model)).mean()
    values = [each.model.layers[1].self_attn.v_proj.weight for each in (model, turned)]  # pyright: ignore
    assert not torch.allclose(*values)
    assert not turned.config.tie_word_embeddings


@pytest.mark.slow
def test_the_verb_writes_the_stock_architecture(tmp_path: Path) -> None:
    model, folder, out = model_of("Mixtral"), tmp_path / "experts", tmp_path / "cured"
    model.save_pretrained(folder)
    save_tokenizer(folder)
    (tmp_path / "words.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    read = {
        "text": str(tmp_path / "words.txt"), "length": 16, "num_sequences": 2, "device": "cpu",
    }  # fmt: skip
    for given, why in (({"prefix": "auto"}, "stores one"), ({"sinks": True}, "experts takes")):
        with pytest.raises(
            WakefulError, match=rf"mixture of experts.*--{next(iter(given))}.*{why}"
        ):
            wakeful.cure(folder, rotate="hadamard", **given, **read)
    cured = wakeful.cure(folder, rotate="hadamard", out=str(out), **read)
    plain, again = (AutoModelForCausalLM.from_pretrained(each) for each in (folder, out))
    assert type(again) is type(plain)
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, plain(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(cured.model.module.get_parameter("lm_head.weight"), again.lm_head.weight)
    assert "Made from experts" in (out / "README.md").read_text("utf-8")
    assert cured.summary["architecture"] == "mixtral"
    narrow = tmp_path / "narrow"
    wakeful.cure(folder, rotate="hadamard", out=str(narrow), stored="bfloat16", **read)
    assert json.loads((narrow / "config.json").read_text("utf-8"))["dtype"] == "bfloat16"
    rounded = AutoModelForCausalLM.from_pretrained(narrow)
    assert torch.equal(rounded.lm_head.weight, again.lm_head.weight.bfloat16())


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
@torch.inference_mode()
def test_values_turn_alone(name: str) -> None:
    model = model_of(name, tie_word_embeddings=True)
    turned = rotate_experts(model, stream=False)
    torch.testing.assert_close(turned(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)
    before = dict(model.named_parameters())
    changed = {part for part, now in turned.named_parameters() if now is not before[part]}
    ends = {"v_proj.weight", "o_proj.weight"} | ({"v_proj.bias"} if name == "GptOss" else set())
    assert {part.partition("self_attn.")[2] for part in changed} == ends
    assert turned.config.tie_word_embeddings


def test_a_routers_correction_is_written_in_full(tmp_path: Path) -> None:
    fields: dict[str, Any] = FEW | ROUTED | {"n_routed_experts": 4, "first_k_dense_replace": 1}
    config = transformers.Glm4MoeConfig(**fields)
    model = AutoModelForCausalLM.from_config(config)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).uniform_(3, 4)
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path, require_end=False)
    save_stock(model, tmp_path / "out", tokenizer=tokenizer, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored[name], model.get_buffer(name))
    assert stored["lm_head.weight"].dtype == torch.bfloat16


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(WakefulError, match=r"parameter model\.layers\.0\.linear_attn"):
        rotate_experts(model_of("Qwen3Next"))
    with pytest.raises(WakefulError, match="eigenbasis"):
        rotate_experts(model_of("Mixtral"), "eigenbasis")
