"""Texts as ids: special ids never come from a text, and no tokenizer runs away."""

import json

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from wakeful.data import encoding
from wakeful.data.encoding import Encoder
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError

SPECIAL = ["</s>", "<s>", "<unk>"]
LETTERS = ["<", "/", "s", ">", "a", "u", "n", "k"]
VOCABULARY = {token: number for number, token in enumerate([*SPECIAL, *LETTERS])}


def spelled(kind: str) -> tokenizers.Tokenizer:
    """Return a tokenizer whose model holds the spelling of its special tokens as an entry."""
    model = {
        "Unigram": models.Unigram(
            [(token, 0.0 if token in SPECIAL else -3.0) for token in VOCABULARY], unk_id=2
        ),
        "WordPiece": models.WordPiece(
            VOCABULARY | {f"##{each}": 11 + n for n, each in enumerate(LETTERS)}, unk_token="<unk>"
        ),
        "WordLevel": models.WordLevel(VOCABULARY, unk_token="<unk>"),
        "BPE that takes whole words": models.BPE(VOCABULARY, [], ignore_merges=True),
        "BPE that merges one": models.BPE(
            VOCABULARY | {"</": 11, "s>": 12}, [("<", "/"), ("s", ">"), ("</", "s>")]
        ),
    }[kind]
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(SPECIAL)
    return inner


@pytest.mark.parametrize(
    "kind",
    ["Unigram", "WordPiece", "WordLevel", "BPE that takes whole words", "BPE that merges one"],
)
def test_no_model_makes_a_special_token_of_its_spelling(kind: str) -> None:
    inner = spelled(kind)
    tokenizer = Tokenizer(inner, end_of_text="</s>")
    assert inner.encode("a </s> <s>").ids[1:] == [0, 1]
    ids = tokenizer.encode("a </s> <s>a </s>")
    assert not {0, 1} & set(ids)
    assert ids[0] == VOCABULARY["a"]
    if kind != "WordLevel":  # which has no other way to write it
        assert tokenizer.decode(ids).replace("##", "").replace(" ", "") == "a</s><s>a</s>"
    assert tokenizer.encode_marked("a </s>")[-1] == 0
    assert json.loads(tokenizer.inner.to_str()) == json.loads(inner.to_str())


def test_a_special_token_of_one_character_has_no_other_spelling() -> None:
    inner = tokenizers.Tokenizer(models.BPE({"!": 0, "a": 1, "</s>": 2}, []))
    inner.add_special_tokens(["!", "</s>"])
    assert Tokenizer(inner, end_of_text="</s>").encode("a!") == [1, 0]


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"a": 0}, unk_token="[UNK]"),
        models.WordPiece({"a": 0}, unk_token="[UNK]"),
        models.BPE({"a": 0}, [], unk_token="[UNK]"),
        models.Unigram([("a", -1.0)], unk_id=None),
    ],
)
def test_an_unknown_token_that_is_missing_is_said(model: models.Model) -> None:
    encoder = Encoder(tokenizers.Tokenizer(model).to_str())
    assert encoder.encode_batch(["a"]) == [[0]]
    with pytest.raises(WakefulError, match=r"cannot encode a text: .*; give the model another"):
        encoder.encode_batch(["b"])
    with pytest.raises(WakefulError, match="cannot encode a text"):
        encoder.encode_with_ends("b")


@pytest.mark.parametrize("where", ["pre_tokenizer", "normalizer"])
def test_a_regular_expression_that_runs_away_is_refused(where: str) -> None:
    inner = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if where == "normalizer":
        inner.normalizer = normalizers.Replace(Regex("(a+)+b"), "a")
    else:
        inner.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    with pytest.raises(WakefulError, match="retry-limit"):
        Encoder(inner.to_str()).encode_batch(["a" * 40])


def test_a_tokenizer_is_timed_before_it_gets_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("a*[^a]"), "isolated")  # takes n² steps
    monkeypatch.setattr(encoding, "_SLOWEST", 0.02)
    with pytest.raises(WakefulError, match=r"takes \d+ s for \d+ characters"):
        Encoder(inner.to_str()).encode_batch(["a" * 10**6])


def test_a_normalizer_that_multiplies_a_text_is_refused() -> None:
    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "</s>": 1}, []))
    twice = normalizers.Replace("a", "aa")
    inner.normalizer = normalizers.Sequence([twice] * 8)
    assert Tokenizer(inner, end_of_text="</s>").encode("a") == [0] * 256
    for steps in ([twice] * 9, [normalizers.Sequence([normalizers.Replace("a", "a" * 300)])]):
        inner.normalizer = normalizers.Sequence(steps)
        with pytest.raises(WakefulError, match=r"normalizer can make a text .* times as long"):
            Encoder(inner.to_str())
        with pytest.raises(WakefulError, match=r"normalizer can make a text .* times as long"):
            Tokenizer(inner, end_of_text="</s>")
