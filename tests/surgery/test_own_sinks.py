"""A gpt-oss's own sinks, set to what a token before the text did."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import wakeful
from quantization.test_experts import TEXT, TOKENS, model_of
from verbs.test_diagnose import save_tokenizer
from wakeful.diagnosis.advice import advise
from wakeful.diagnosis.later_sinks import LaterSink
from wakeful.errors import WakefulError
from wakeful.surgery import fit_own_sinks, prepend_tokens

SLOW = {"rope_type": "linear", "factor": 1e12, "rope_theta": 1e4}
ROWS = torch.cat(TEXT)


def gpt_oss(log_sink: float, **over: object) -> Any:
    model: Any = model_of("GptOss", **over)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(log_sink)
    return model


def after(model: Any, token: int, text: Tensor) -> Tensor:
    return model(prepend_tokens((token,), text)).logits[:, 1:]


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("stretch", [1.0, 1.3])
@torch.inference_mode()
def test_without_rope_weak_sinks_become_the_token(heads: int, stretch: float) -> None:
    model = gpt_oss(-40.0, rope_parameters=SLOW, num_key_value_heads=heads)
    model.model.rotary_emb.attention_scaling = stretch
    before = {part: tensor.clone() for part, tensor in model.state_dict().items()}
    fitted = fit_own_sinks(model, 5, ROWS)
    expected = after(model, 5, TOKENS)
    torch.testing.assert_close(fitted(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    for layer in fitted.model.layers:
        assert layer.self_attn.sinks.abs().max() < 1e-4
    assert all(torch.equal(before[part], now) for part, now in model.state_dict().items())


@pytest.mark.parametrize("log_sink", [-2.0, 0.0, 1.0])
@torch.inference_mode()
def test_fitted_sinks_come_nearer_than_those_before(log_sink: float) -> None:
    """A weight at both, which no one value stands for at every query."""
    model = gpt_oss(log_sink, rope_parameters=SLOW)
    expected = after(model, 5, ROWS)
    far = (model(ROWS).logits - expected).square().mean()
    fitted = fit_own_sinks(model, 5, ROWS)
    assert (fitted(ROWS).logits - expected).square().mean() < far / 2


@torch.inference_mode()
def test_windows_bound_the_text_that_is_read() -> None:
    model = gpt_oss(-40.0, rope_parameters=SLOW, sliding_window=12)
    short = fit_own_sinks(model, 5, ROWS[:, :11])
    long = fit_own_sinks(model, 5, ROWS)
    torch.testing.assert_close(long(TOKENS).logits, short(TOKENS).logits)


def test_others_are_refused() -> None:
    with pytest.raises(WakefulError, match="only gpt-oss"):
        fit_own_sinks(model_of("Mixtral"), 5, ROWS)
    with pytest.raises(WakefulError, match="attention_bias"):
        fit_own_sinks(model_of("GptOss", attention_bias=False), 5, ROWS)


@pytest.mark.slow
def test_the_verb_writes_a_gpt_oss_and_the_advice_tries_it(tmp_path: Path) -> None:
    folder, out = tmp_path / "oss", tmp_path / "cured"
    gpt_oss(-40.0, rope_parameters=SLOW).save_pretrained(folder)
    save_tokenizer(folder)
    words = "The quick brown fox jumps over the lazy dog. " * 40
    (tmp_path / "words.txt").write_text(words)
    read = {"text": str(tmp_path / "words.txt"), "length": 16, "num_sequences": 2}
    cured = wakeful.cure(folder, sinks=True, out=str(out), device="cpu", **read)
    (told,) = (value for name, value in cured.summary["done"].items() if name == "Learned sinks")
    token = int(told.split("(id ")[1].split(")")[0])
    plain, again = (AutoModelForCausalLM.from_pretrained(each) for each in (folder, out))
    assert type(again) is type(plain)
    with torch.no_grad():
        expected = after(plain, token, TOKENS)
        torch.testing.assert_close(again(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(out)("fox").input_ids[:1] != [token]
    assert cured.summary["loss_change"]["windows"] > 1

    model = wakeful.load(folder)
    (found,) = wakeful.diagnose(model, no_advice=True, **read).models
    ids = model.encode_plain(words)
    sunk = type(found)(
        **vars(found) | {"later_sinks": (LaterSink(name="x", share=0.5, mass=0.5, even=0.0),)}
    )
    advice = advise(model, sunk, [ids[n : n + 16] for n in (0, 16, 32, 48)])
    assert advice is not None
    assert "set its own sinks: the loss changes by" in advice.words
