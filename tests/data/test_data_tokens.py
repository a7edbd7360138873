"""Documents become tokens, once and the same every time."""

import numpy as np
import pytest

from data.preparations import TEXTS, failure, left_over, texts_of, write
from wakeful.data import PreparedData, Tokenizer, prepare, prepare_data
from wakeful.data.tokens import token_dtype
from wakeful.paths import default_cache_dir


def test_every_document_is_there_once_and_followed_by_its_end(source, tmp_path):
    data = prepare(source, tmp_path / "data", vocab_size=300)
    train, validation = texts_of(data, "train"), texts_of(data, "validation")
    assert sorted(train + validation) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in set(train)]
    assert 0 < len(validation) < 15
    assert data.train.num_bytes == sum(len(text.encode()) for text in train)
    assert data.train.tokens.dtype == np.dtype("<u2")
    assert isinstance(data.train.tokens, np.memmap)
    assert not left_over(tmp_path)
    assert PreparedData.open(tmp_path / "data").validation.num_tokens == len(data.validation.tokens)


def test_long_documents_are_written_in_pieces(source, tmp_path, monkeypatch):
    whole = prepare(source, tmp_path / "whole", vocab_size=300)
    monkeypatch.setattr("wakeful.data.encoding.PIECE_CHARACTERS", 9)
    monkeypatch.setattr("wakeful.data.preparing.BATCH_BYTES", 20)
    assert prepare(source, tmp_path / "pieces", vocab_size=300).info == whole.info


def test_it_is_the_same_every_time(source, tmp_path):
    first = prepare(source, tmp_path / "a", vocab_size=300)
    second = prepare(source, tmp_path / "b", vocab_size=300)
    assert first.info == second.info
    other = prepare(source, tmp_path / "c", vocab_size=300, seed=1)
    assert texts_of(other, "validation") != texts_of(first, "validation")


def test_the_tokenizer_learns_from_training_documents_alone(tmp_path):
    for name, letter in [("train", "a"), ("validation", "z")]:
        write(tmp_path / f"{name}.jsonl", [letter * 50 + str(n) for n in range(20)])
    data = prepare(
        str(tmp_path / "train.jsonl"),
        tmp_path / "data",
        vocab_size=300,
        validation_source=str(tmp_path / "validation.jsonl"),
    )
    assert data.tokenizer.inner.token_to_id("aa") is not None
    assert data.tokenizer.inner.token_to_id("zz") is None
    assert len(data.validation.documents) == 20


def test_a_tokenizer_may_be_given(source, tmp_path):
    tokenizer = Tokenizer.train(["other text"], 257)
    tokenizer.save(tmp_path / "tokenizer")
    for number, given_as in enumerate([tokenizer, tmp_path / "tokenizer"]):
        data = prepare(source, tmp_path / f"data{number}", tokenizer=given_as)
        assert data.tokenizer.fingerprint == tokenizer.fingerprint
        assert data.vocab_size == 257


def test_wide_ids_for_large_vocabularies():
    assert token_dtype(2**16) == "uint16"
    assert token_dtype(2**16 + 1) == "uint32"


@pytest.mark.slow
def test_wide_ids_on_disk(source, tmp_path):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = {c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    filling = {f"filling {n}": n for n in range(256, 70_000)}
    inner = tokenizers.Tokenizer(models.BPE(alphabet | filling | {"<e>": 70_000}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    data = prepare(source, tmp_path / "d", tokenizer=Tokenizer(inner, end_of_text="<e>"))
    assert data.train.tokens.dtype == np.dtype("<u4")
    assert data.train.tokens.max() == 70_000
    assert sorted(texts_of(data, "train") + texts_of(data, "validation")) == sorted(TEXTS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"validation_fraction": 0.0}, "validation_fraction is 0.0"),
        ({"validation_fraction": 1}, "validation_fraction is 1"),
        ({"vocab_size": 100}, "at least 257"),
        ({"tokenizer": "nowhere"}, "no tokenizer at nowhere"),
        ({"text_field": "body"}, "no field 'body'"),
    ],
)
def test_bad_options(source, tmp_path, options, words):
    assert words in failure(source, tmp_path / "d", **options)
    assert not (tmp_path / "d").exists()
    assert not left_over(tmp_path)


def test_max_bytes_less_than_a_character(tmp_path):
    write(tmp_path / "a.jsonl", ["日本"])
    assert "max_bytes is 2" in failure(str(tmp_path / "a.jsonl"), tmp_path / "d", max_bytes=2)


def test_progress_is_told(source, tmp_path):
    calls = []
    prepare(source, tmp_path / "d", vocab_size=300, progress=lambda *call: calls.append(call))
    assert list(dict.fromkeys(stage for stage, _, _ in calls)) == [
        "reading",
        "tokenizer",
        "encoding",
        "comparing",
    ]
    total = sum(len(text.encode()) for text in TEXTS)
    assert ("reading", total, total) in calls
    assert all(bound is None or done <= bound for _, done, bound in calls)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WAKEFUL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == tmp_path / ".cache" / "wakeful"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(default_cache_dir()) == "/x/wakeful"
    monkeypatch.setenv("WAKEFUL_CACHE", "/own")
    assert str(default_cache_dir()) == "/own"


def test_the_cache_is_keyed_by_source_and_settings(source, tmp_path, monkeypatch):
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    first = prepare_data(source, vocab_size=300)
    assert first.folder.parent == tmp_path / "cache" / "data"
    assert first.folder.name.startswith("source-")
    assert prepare_data(source, vocab_size=300).folder == first.folder
    assert prepare_data(source, vocab_size=301).folder != first.folder
    write(tmp_path / "source.jsonl", TEXTS[1:])
    assert prepare_data(source, vocab_size=300).folder != first.folder


@pytest.mark.slow
def test_the_default_corpus(tmp_path):
    options = {"vocab_size": 512, "max_bytes": 400_000, "cache_dir": tmp_path}
    data = prepare_data(**options)
    assert 380_000 < data.train.num_bytes + data.validation.num_bytes <= 400_000
    assert data.vocab_size == 512
    assert prepare_data(**options).info == data.info
