"""Modules in memory: measured without dropout, given back as they were, refused with adapters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import wakeful
from training.runs import text
from wakeful.errors import WakefulError
from wakeful.quantization import quantize_module

__all__ = ["text"]
LOOKS = {"length": 16, "num_sequences": 2, "device": "cpu"}
Verb = Callable[[Any, Any, Path, Path], object]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3, attention_dropout=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<bos>", "<eos>"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>")


def in_training(module: nn.Module) -> nn.Module:
    """Put a module into training, all but its first norm, and let no weight rest."""
    module.train().requires_grad_(True)
    next(part for part in module.modules() if "Norm" in type(part).__name__).eval()
    return module


def modes(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()] + [
        parameter.requires_grad for parameter in module.parameters()
    ]


def generated(module: Any, words: Any, text: Path, out: Path) -> object:
    return wakeful.generate(module, "def ", tokenizer=words, num_tokens=8, device="cpu")


def diagnosed(module: Any, words: Any, text: Path, out: Path) -> object:
    return wakeful.diagnose(module, text=str(text), tokenizer=words, **LOOKS).verdicts


def evaluated(module: Any, words: Any, text: Path, out: Path) -> object:
    return wakeful.evaluate(module, text=str(text), tokenizer=words, **LOOKS).verdicts


def quantized(module: Any, words: Any, text: Path, out: Path) -> object:
    found = wakeful.quantize(
        module, "scheme(weights=absmax(bits=4, per='channel', group=8), method=gptq)",
        text=str(text), tokenizer=words, calibration_sequences=2, **LOOKS,
    )  # fmt: skip
    return found.frame.to_dicts()


def cured(module: Any, words: Any, text: Path, out: Path) -> object:
    found = wakeful.cure(
        module, rotate="hadamard", prefix="auto", text=str(text), tokenizer=words, **LOOKS
    )
    return found.verdicts, found.model.logits(torch.arange(9)[None]).tolist()


def with_sinks(module: Any, words: Any, text: Path, out: Path) -> object:
    found = wakeful.cure(module, sinks=True, text=str(text), tokenizer=words, **LOOKS)
    return found.verdicts


def written(module: Any, words: Any, text: Path, out: Path) -> object:
    wakeful.export(module, out / "copy", tokenizer=words)
    return wakeful.load(out / "copy", device="cpu").logits(torch.arange(9)[None]).tolist()


def inherited(module: Any, words: Any, text: Path, out: Path) -> object:
    found = wakeful.inherit(
        module, text=str(text), out=str(out / "heir"), tokenizer=words, steps=2, keep=0.5,
        batch_size=2, length=16, device="cpu", validation_fraction=0.1,
    )  # fmt: skip
    return found.summary["reference"]["loss"]


VERBS = (generated, diagnosed, evaluated, quantized, cured, with_sinks, written, inherited)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["transformers", "decoder"])
def test_a_module_in_training_is_measured_without_dropout_and_given_back(
    verb: Verb, kind: str, text: Path, tmp_path: Path
) -> None:
    def made() -> tuple[nn.Module, Any]:
        module, words = llama(), tokenizer()
        if kind == "transformers":
            return module, words
        model = wakeful.load(module, tokenizer=words)
        return model.decoder(), model.wakeful_tokenizer

    resting, words = made()
    expected = verb(resting, words, text, tmp_path / "resting")
    module = in_training(made()[0])
    before = modes(module)
    assert verb(module, words, text, tmp_path / "training") == expected
    assert modes(module) == before


def test_a_model_runs_in_evaluation_mode_whatever_its_module_does() -> None:
    module, tokens = llama(), torch.arange(12)[None]
    model = wakeful.load(module, tokenizer=tokenizer())
    logits, said = model.logits(tokens), model.generate("def ", num_tokens=8)
    in_training(module)
    before = modes(module)
    torch.testing.assert_close(model.logits(tokens), logits)
    assert model.generate("def ", num_tokens=8) == said
    pieces = model.stream("def ", num_tokens=8)
    next(pieces)
    assert modes(module) == before  # between two tokens, too
    assert module(tokens).logits.sub(logits).abs().max() > 0.1
    with pytest.raises(WakefulError, match="temperature"):
        model.generate("def ", temperature=-1.0)
    assert modes(module) == before


def test_a_model_takes_the_tokenizer_and_the_context_that_are_asked_for() -> None:
    model, other = wakeful.load(llama(), tokenizer=tokenizer()), tokenizer()
    assert wakeful.load(model, max_length=64) is model
    again = wakeful.load(model, tokenizer=other, max_length=16)
    assert (again.module, again.tokenizer, again.context) == (model.module, other, 16)
    assert model.context == 64
    for each in (model, model.module):
        with pytest.raises(WakefulError, match="step = 3: a model in memory"):
            wakeful.load(each, step=3)
        with pytest.raises(WakefulError, match="max_length = -1 must not be negative"):
            wakeful.load(each, tokenizer=other, max_length=-1)


def test_an_error_gives_a_module_back_as_it_was(tmp_path: Path) -> None:
    module, short = in_training(llama()), tmp_path / "short.txt"
    before = modes(module)
    short.write_text("a")
    with pytest.raises(WakefulError, match="and the text has 1"):
        wakeful.diagnose(module, text=str(short), tokenizer=tokenizer(), **LOOKS)
    assert modes(module) == before


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("scheme", ["w4a16", "kv8"])
def test_adapters_are_measured_and_never_become_a_part_of_another_model(
    scheme: str, text: Path, tmp_path: Path
) -> None:
    adapted = peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM",
                                 init_lora_weights=False),
    )  # fmt: skip
    words, tokens = tokenizer(), torch.arange(12)[None]
    with pytest.raises(WakefulError, match=r"merge_and_unload\(\).*get_base_model\(\)"):
        wakeful.load(adapted)
    module = adapted.get_base_model()
    assert diagnosed(module, words, text, tmp_path)
    model = wakeful.load(module, tokenizer=words)
    logits = model.logits(tokens)
    named = r"model\.layers\.0\.self_attn\.v_proj is a Linear of peft.*merge_and_unload\(\)"
    for verb in (quantized, cured, written, inherited):
        with pytest.raises(WakefulError, match=named):
            verb(module, words, text, tmp_path)
    with pytest.raises(WakefulError, match=named):
        model.decoder()
    with pytest.raises(WakefulError, match=named):
        quantize_module(module, scheme)
    merged = wakeful.load(adapted.merge_and_unload(), tokenizer=words)
    torch.testing.assert_close(merged.decoder()(tokens), logits, atol=1e-4, rtol=1e-4)
    assert not (tmp_path / "copy").exists()
    assert not (tmp_path / "heir").exists()
