"""Prepared tokens: what is written, what is split, what is reused and what is refused."""

import json
import os
import resource
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakeful.data import PreparedData, TokenFile, Tokenizer, cache, prepare, prepared, preparing
from wakeful.data.document import Document
from wakeful.data.split import split_by_hash
from wakeful.data.spool import Spool
from wakeful.data.tokens import token_dtype
from wakeful.errors import WakefulError

TEXTS = [f"document {number}: {'word ' * (number % 7 + 1)}\n日本" for number in range(60)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.jsonl"
    write(path, TEXTS)
    return str(path)


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def failure(*arguments, **options):
    with pytest.raises(WakefulError) as caught:
        prepare(*arguments, **({"vocab_size": 300} | options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def texts_of(data, split):
    token_file, tokenizer = data.split(split), data.tokenizer
    ends = [*token_file.documents[1:], token_file.num_tokens]
    rows = [token_file.tokens[a:b] for a, b in zip(token_file.documents, ends, strict=True)]
    assert all(row[-1] == token_file.end_of_text for row in rows)
    return [tokenizer.decode(row[:-1], special=True) for row in rows]


def left_over(folder):
    return [path.name for path in folder.iterdir() if "partial" in path.name]


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
    assert TokenFile.open(tmp_path / "data", "validation", verify=True).num_tokens == len(
        data.validation.tokens
    )


def test_long_documents_are_written_in_pieces(source, tmp_path, monkeypatch):
    whole = prepare(source, tmp_path / "whole", vocab_size=300)
    monkeypatch.setattr("wakeful.data.tokenizer.PIECE_CHARACTERS", 9)
    monkeypatch.setattr("wakeful.data.encode.BATCH_BYTES", 20)
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


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(st.sampled_from("abcd"), min_size=1, max_size=2), min_size=2),
    fraction=st.floats(0.001, 0.999),
    seed=st.integers(0, 2**64),
)
def test_no_text_is_on_both_sides(tmp_path_factory, texts, fraction, seed):
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder / "source")
    spool.fill(Document("name", text) for text in texts)
    if len(set(texts)) == 1:
        with pytest.raises(WakefulError, match="the same text"):
            split_by_hash(spool, fraction=fraction, seed=seed, scratch=folder / "parts")
        return
    split = split_by_hash(spool, fraction=fraction, seed=seed, scratch=folder / "parts")
    sides = [
        [d.text for d in side.spool.read(side.wanted)] for side in (split.train, split.validation)
    ]
    assert all(sides)
    assert not set(sides[0]) & set(sides[1])
    assert sorted(sides[0] + sides[1]) == sorted(texts)


def test_a_text_keeps_its_side_when_others_come(tmp_path):
    for name, texts in [("few", TEXTS), ("more", [*TEXTS, *(f"new {n}" for n in range(60))])]:
        write(tmp_path / f"{name}.jsonl", texts)
    few, more = (
        prepare(str(tmp_path / f"{name}.jsonl"), tmp_path / name, vocab_size=260, seed=3)
        for name in ("few", "more")
    )
    assert set(texts_of(few, "train")) <= set(texts_of(more, "train"))
    assert set(texts_of(few, "validation")) <= set(texts_of(more, "validation"))


def test_one_document_is_cut_near_its_end(tmp_path):
    text = "".join(f"line {number}\n" for number in range(1000))
    (tmp_path / "a.txt").write_text(text)
    data = prepare(str(tmp_path / "a.txt"), tmp_path / "d", vocab_size=300, validation_fraction=0.1)
    (train,), (validation,) = texts_of(data, "train"), texts_of(data, "validation")
    assert train + validation == text
    assert train.endswith("\n")
    assert 0.09 < len(validation) / len(text) < 0.12
    (tmp_path / "b.txt").write_text("x")
    assert "too short" in failure(str(tmp_path / "b.txt"), tmp_path / "e")


def test_validation_that_overlaps_training_is_refused(source, tmp_path):
    write(tmp_path / "v.jsonl", ["new", TEXTS[7]])
    message = failure(source, tmp_path / "d", validation_source=str(tmp_path / "v.jsonl"))
    assert "validation overlaps training: 'v.jsonl:2'" in message
    assert "'source.jsonl:8'" in message
    assert not (tmp_path / "d").exists()
    assert not left_over(tmp_path)


def test_overlap_is_seen_where_the_training_text_was_cut(tmp_path):
    write(tmp_path / "t.jsonl", ["a" * 100])
    write(tmp_path / "v.jsonl", ["a" * 100])
    assert "overlaps" in failure(
        str(tmp_path / "t.jsonl"),
        tmp_path / "d",
        validation_source=str(tmp_path / "v.jsonl"),
        max_bytes=50,
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.sampled_from("aé日😀"), min_size=1), min_size=1), st.integers(1, 60))
def test_max_bytes_takes_the_beginning_and_cuts_no_character(tmp_path_factory, texts, max_bytes):
    spool = Spool(tmp_path_factory.mktemp("spool") / "source")
    documents = (Document(str(number), text) for number, text in enumerate(texts))
    spool.fill(documents, max_bytes=max_bytes)
    taken = [d.text for d in spool.read(np.ones(len(spool), bool))]
    whole = "".join(texts)
    assert whole.startswith("".join(taken))
    assert spool.num_bytes == len("".join(taken).encode()) == spool.lengths.sum()
    assert min(max_bytes, len(whole.encode())) - 3 <= spool.num_bytes <= max_bytes
    assert all(text == whole_text for text, whole_text in zip(taken[:-1], texts, strict=False))


def test_the_same_is_taken_from_disk(source, tmp_path, monkeypatch):
    first = prepare(source, tmp_path / "d", vocab_size=300)
    with monkeypatch.context() as patch:
        patch.setattr("wakeful.data.preparing.read_documents", None)  # not even read
        assert prepare(source, tmp_path / "d", vocab_size=300).info == first.info
    os.utime(source, (0, 0))  # touched, but the same text
    assert prepare(source, tmp_path / "d", vocab_size=300).info == first.info
    write(tmp_path / "source.jsonl", TEXTS[1:])
    assert "another state of the source" in failure(source, tmp_path / "d")
    assert "another vocab_size and seed" in failure(source, tmp_path / "d", vocab_size=301, seed=9)
    assert not left_over(tmp_path)


def test_a_folder_that_is_not_ours_is_left_alone(source, tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "letter.txt").write_text("dear")
    assert "is no prepared data" in failure(source, folder)
    assert "is no prepared data" in failure(source, source)
    assert (folder / "letter.txt").read_text() == "dear"
    (folder / "letter.txt").unlink()
    assert prepare(source, folder, vocab_size=300).train.num_tokens  # an empty folder is free


def test_a_folder_inside_its_source_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert "inside its source" in failure(str(tmp_path), tmp_path / "data")


def test_two_at_once(source, tmp_path, monkeypatch):
    """Another process moves the same data in while ours is being built."""
    other = prepare(source, tmp_path / "other", vocab_size=300)
    move_in = preparing.move_in

    def late(building, folder, settings):
        shutil.copytree(other.folder, folder)
        move_in(building, folder, settings)

    monkeypatch.setattr(preparing, "move_in", late)
    assert prepare(source, tmp_path / "d", vocab_size=300).info == other.info
    assert not left_over(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"validation_fraction": 0.0}, "validation_fraction is 0.0"),
        ({"validation_fraction": 1}, "validation_fraction is 1"),
        ({"max_bytes": 0}, "max_bytes is 0"),
        ({"vocab_size": None}, "neither was given"),
        ({"vocab_size": 100}, "at least 257"),
        ({"tokenizer": "nowhere", "vocab_size": 300}, "both were given"),
        ({"tokenizer": "nowhere", "vocab_size": None}, "no tokenizer at nowhere"),
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


@contextmanager
def files_no_longer_than(num_bytes):
    """A limit of the system's own, which makes writing fail as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [1000, 8000])  # too few for the text, for the tokens
def test_a_full_disk_leaves_nothing(tmp_path, num_bytes):
    write(tmp_path / "a.jsonl", [f"{n} {'é' * 60}" for n in range(40)])
    tokenizer = Tokenizer.train(["x"] * 9, 257)
    with files_no_longer_than(num_bytes):
        message = failure(
            str(tmp_path / "a.jsonl"), tmp_path / "x" / "d", vocab_size=None, tokenizer=tokenizer
        )
    assert "free some space" in message
    assert not list((tmp_path / "x").iterdir())
    assert prepare(str(tmp_path / "a.jsonl"), tmp_path / "x" / "d", tokenizer=tokenizer)


def test_a_full_disk_late_leaves_nothing(source, tmp_path, monkeypatch):
    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Tokenizer, "save", full)
    assert "No space left on device" in failure(source, tmp_path / "d")
    assert not left_over(tmp_path)
    assert not (tmp_path / "d").exists()


def test_an_interrupt_leaves_nothing(source, tmp_path):
    def stop(stage, done, total):
        if stage == "encoding":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "d", vocab_size=300, progress=stop)
    assert not left_over(tmp_path)


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


@pytest.mark.parametrize("name", ["train.tokens", "validation.documents.npy", "data.json"])
@pytest.mark.parametrize("change", ["cut", "empty", "gone"])
def test_a_damaged_folder_is_noticed(source, tmp_path, name, change):
    folder = prepare(source, tmp_path / "d", vocab_size=300).folder
    path = folder / name
    data = path.read_bytes()
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-3] if change == "cut" else b"")
    with pytest.raises(WakefulError, match="prepare") as caught:
        TokenFile.open(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["train.tokens", "validation.documents.npy", "tokenizer.json"])
def test_a_changed_byte_is_found_by_verify(source, tmp_path, name):
    folder = prepare(source, tmp_path / "d", vocab_size=300).folder
    PreparedData.open(folder, verify=True)
    data = bytearray((folder / name).read_bytes())
    data[-8] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(WakefulError, match="SHA-256"):
        PreparedData.open(folder, verify=True)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"format": "other"},
        {"dtype": "object"},
        {"dtype": ["uint16"]},
        {"splits": {}},
        {"splits": {"train": {"tokens": -1}, "validation": {}}},
        {"tokenizer": {"vocab_size": True}},
        {"corpora_sha256": []},
    ],
)
def test_a_description_that_does_not_hold(source, tmp_path, change):
    folder = prepare(source, tmp_path / "d", vocab_size=300).folder
    info = json.loads((folder / "data.json").read_text()) | change
    (folder / "data.json").write_text(json.dumps(info))
    with pytest.raises(WakefulError):
        PreparedData.open(folder)


def test_pickles_are_never_opened(source, tmp_path):
    folder = prepare(source, tmp_path / "d", vocab_size=300).folder
    np.save(folder / "train.documents.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(WakefulError, match="damaged"):
        PreparedData.open(folder)


@pytest.mark.usefixtures("as_users_run_it")
def test_no_such_split(source, tmp_path):
    folder = prepare(source, tmp_path / "d", vocab_size=300).folder
    with pytest.raises(WakefulError, match="no split 'test'"):
        TokenFile.open(folder, "test")


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WAKEFUL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.default_cache_dir() == tmp_path / ".cache" / "wakeful"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(cache.default_cache_dir()) == "/x/wakeful"
    monkeypatch.setenv("WAKEFUL_CACHE", "/own")
    assert str(cache.default_cache_dir()) == "/own"


def test_the_cache_is_keyed_by_source_and_settings(source, tmp_path, monkeypatch):
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    first = prepared(source, vocab_size=300)
    assert first.folder.parent == tmp_path / "cache" / "data"
    assert first.folder.name.startswith("source-")
    assert prepared(source, vocab_size=300).folder == first.folder
    assert prepared(source, vocab_size=301).folder != first.folder
    write(tmp_path / "source.jsonl", TEXTS[1:])
    assert prepared(source, vocab_size=300).folder != first.folder


def test_the_default_corpus(tmp_path):
    options = {"vocab_size": 512, "max_bytes": 400_000, "cache_dir": tmp_path}
    data = prepared(**options)
    assert 380_000 < data.train.num_bytes + data.validation.num_bytes <= 400_000
    assert data.vocab_size == 512
    assert prepared(**options).info == data.info
