"""Perplexity in windows against an explicit computation, token by token."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import wakeful
from evaluation.models import loaded_llama, save_llama
from training.runs import text, tiny
from wakeful.errors import WakefulError
from wakeful.evaluation.perplexity import log_likelihoods, measure_perplexity
from wakeful.loading.load import load
from wakeful.loading.model import Model
from wakeful.loading.reading import cut_windows, tokenize
from wakeful.model.decoder import IGNORED
from wakeful.training.loop import train_run

__all__ = ["text"]
WORDS = "naïve café 😀 — the cat sat on the mat, and then it sat on the hat again. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return loaded_llama(tmp_path_factory.mktemp("models") / "llama")


def explicit(model: Model, tokens: list[int], length: int, stride: int, bos: bool) -> list[float]:
    """Return −log p of each counted token: every token by itself, from its window's tokens."""
    stream = [model.bos, *tokens] if bos else tokens
    nats: list[float] = []
    for place in range(1, len(stream)):
        # The first window that reaches this token.
        start = max(0, math.ceil((place - length) / stride)) * stride
        context = stream[start:place]
        if bos:
            context[0] = stream[0]
        with torch.no_grad():
            logits = model.module(torch.tensor([context])).logits[0, -1]
        nats.append(-float(logits.log_softmax(0)[stream[place]]))
    return nats


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(
    ("length", "stride"), [(16, 16), (16, 5), (17, 1), (64, 64), (64, 40), (2, 1), (2, 2)]
)
def test_every_token_counts_once(model: Model, length: int, stride: int, bos: bool) -> None:
    words = WORDS[:73]
    tokens = model.encode_plain(words)
    nats = explicit(model, tokens, length, stride, bos)
    found, bits = measure_perplexity(
        model, words, length=length, stride=stride, bos=bos, batch_size=3
    )
    assert found.weights.sum() == len(nats) == len(tokens) - (not bos)
    assert found.values.sum() == pytest.approx(sum(nats), rel=1e-12)
    assert found.figure == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-12)
    scored = len(words.encode()) - (0 if bos else len(words[0].encode()))
    assert bits.weights.sum() == scored
    assert bits.figure == pytest.approx(sum(nats) / math.log(2) / scored, rel=1e-12)


@given(st.integers(2, 60), st.integers(2, 20), st.data(), st.booleans())
def test_windows_cover_each_target_once(
    count: int, length: int, data: st.DataObject, bos: bool
) -> None:
    stride = data.draw(st.integers(1, length))
    stream = [-1, *range(100, 100 + count)] if bos else list(range(100, 100 + count))
    cut = cut_windows(stream, length=length, stride=stride, bos=bos)
    counted = [target for window in cut for target in window.targets if target != IGNORED]
    assert counted == stream[1:]
    for window in cut:
        assert len(window.inputs) == len(window.targets) <= length
        new = [n for n, target in enumerate(window.targets) if target != IGNORED]
        assert window.targets[new[0]] == stream[window.first_target]
        assert (window.inputs[0] == -1) == bos
        for n in new[1 if bos else 0 :]:
            assert window.targets[n] == window.inputs[n] + 1 or window.inputs[n] == -1


def test_windows_may_be_limited(model: Model) -> None:
    all_of_it, bits = measure_perplexity(model, WORDS, length=16, stride=16)
    first, first_bits = measure_perplexity(model, WORDS, length=16, stride=16, num_sequences=2)
    assert first.values == pytest.approx(all_of_it.values[:2])
    assert first.weights.tolist() == [16, 16]
    assert first.keys == all_of_it.keys[:2]
    assert first_bits.weights.tolist() == bits.weights[:2].tolist()
    more, _ = measure_perplexity(model, WORDS, length=16, stride=16, num_sequences=10**6)
    assert more.keys == all_of_it.keys


def test_bytes_are_those_of_the_text(model: Model, text: Path, tmp_path: Path) -> None:
    run = train_run(tiny(text), tmp_path / "run")
    ours = load(str(run.path), device=torch.device("cpu"), dtype=torch.float32)
    for each in (model, ours):
        for words in (WORDS, "  def \n\n\t value é漢字😀  in\n"):
            tokens, ends = tokenize(each, words)
            assert tokens == each.encode_plain(words)
            assert ends is not None
            assert (len(ends), ends[0], ends[-1]) == (len(tokens) + 1, 0, len(words.encode()))
            assert (np.diff(ends) >= 0).all()
    spelled = "the <|endoftext|> of a text"  # which stays ordinary characters
    assert tokenize(ours, spelled)[0] == ours.encode_plain(spelled)


def test_our_decoder_has_the_loss_of_its_own(text: Path, tmp_path: Path) -> None:
    run = train_run(tiny(text), tmp_path / "run")
    ours = load(str(run.path), device=torch.device("cpu"), dtype=torch.float64)
    words = (text / "000.txt").read_text()
    tokens = torch.tensor([ours.encode_plain(words)[:33]])
    expected = ours.module.loss(tokens[:, :-1], tokens[:, 1:], reduction="none")
    likelihoods = log_likelihoods(ours.module, tokens[:, :-1], tokens[:, 1:])
    assert -likelihoods == pytest.approx(expected, rel=1e-9)
    found, _ = measure_perplexity(ours, words, length=32, stride=32, num_sequences=1)
    assert found.values[0] == pytest.approx(float(expected.sum()), rel=1e-9)


def test_what_cannot_be_measured_is_refused(model: Model, tmp_path: Path) -> None:
    def fails(message: str, words: str = WORDS, each: Model = model, **over: int | bool) -> None:
        with pytest.raises(WakefulError, match=message):
            measure_perplexity(each, words, **({"length": 16, "stride": 16} | over))  # pyright: ignore

    fails("at least 2 are needed", words="x")
    fails("at least 2 are needed", words="", bos=True)
    fails("context of 64 tokens", length=65)
    fails("at least 2 tokens", length=1)
    fails("between 1 and the length, 16", stride=17)
    fails("between 1 and the length, 16", stride=0)
    fails("has no BOS", each=loaded_llama(tmp_path / "none", bos=False), bos=True)


def test_a_model_that_gives_nan_is_named_so(tmp_path: Path) -> None:
    broken = loaded_llama(tmp_path / "llama", dtype=torch.float32)
    broken.module.get_parameter("model.norm.weight").data.fill_(math.inf)
    with pytest.raises(WakefulError, match="outputs are not finite"):
        measure_perplexity(broken, WORDS, length=16, stride=16)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["moderate", "coarse"])
def test_a_quantized_models_perplexity_does_not_depend_on_the_batch(
    scheme: str, tmp_path: Path
) -> None:
    small = wakeful.quantize(str(save_llama(tmp_path / "llama", seed=1)), scheme).model
    sizes = (1, 3, 4)
    # Seven windows and a shorter one: 3 and 4 leave it beside others.
    options = {"length": 24, "stride": 24, "num_sequences": 8}
    found = [measure_perplexity(small, WORDS[:190], batch_size=size, **options) for size in sizes]
    assert len(found[0][0].values) == 8
    for scores in found[1:]:
        for one, other in zip(found[0], scores, strict=True):
            assert other.figure == pytest.approx(one.figure, rel=1e-6)
    (tmp_path / "words.txt").write_text(WORDS, "utf-8")
    said = [
        wakeful.evaluate(
            small, text=str(tmp_path / "words.txt"), batch_size=size, **options
        ).frame["value"].to_list()
        for size in sizes
    ]  # fmt: skip
    assert said[1] == pytest.approx(said[0], rel=1e-6)
    assert said[2] == pytest.approx(said[0], rel=1e-6)


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    llama = save_llama(tmp_path / "llama")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(llama)
    tokenizer.add_tokens(["zebra"])
    loaded = load(str(llama), tokenizer=tokenizer)
    told = "is given token 258, and has embeddings of 258 tokens"
    for call in (loaded.encode_plain, loaded.encode, lambda text: tokenize(loaded, text),
                 lambda text: loaded.generate(text, num_tokens=1)):  # fmt: skip
        with pytest.raises(WakefulError, match=told):
            call("a zebra")
    assert loaded.encode_plain("a bear")
    assert tokenize(loaded, "a bear")[0] == loaded.encode_plain("a bear")
