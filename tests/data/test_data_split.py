"""Which documents are held out, and how much is read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.preparations import TEXTS, failure, left_over, texts_of, write
from wakeful.data import prepare
from wakeful.data.readers import Document
from wakeful.data.split import Spool, split_by_hash
from wakeful.errors import WakefulError


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
        [d.text for d in side.spool.read(side.mask)] for side in (split.train, split.validation)
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
    long = "a title\n" + " ".join(f"word {n}" for n in range(1000))  # no line ends near its end
    (tmp_path / "c.txt").write_text(long)
    data = prepare(str(tmp_path / "c.txt"), tmp_path / "f", vocab_size=300, validation_fraction=0.1)
    (validation,) = texts_of(data, "validation")
    assert 0.09 < len(validation) / len(long) < 0.11
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


COPIES = [
    "Zoë and\nher café",
    "Zoë and\r\nher café",
    "Zoe\u0308 and\nher cafe\u0301",
    "\n Zoë and\rher café\n\n",
]


@pytest.mark.parametrize("seed", range(8))
def test_copies_but_for_line_ends_unicode_form_and_outer_space_are_on_one_side(tmp_path, seed):
    spool = Spool(tmp_path / "source")
    spool.fill(Document("name", text) for text in [*TEXTS, *COPIES, "Zoe and\nher cafe"])
    split = split_by_hash(spool, fraction=0.4, seed=seed, scratch=tmp_path / "parts")
    assert len(set(split.train.mask[len(TEXTS) : len(TEXTS) + len(COPIES)])) == 1
    assert len(spool.digests) == len(TEXTS) + len(COPIES) + 1
    assert len(set(spool.digests.tolist())) == len(TEXTS) + 2


def test_copies_alone_leave_nothing_to_validate_on(tmp_path):
    write(tmp_path / "a.jsonl", COPIES)
    assert "the same text" in failure(str(tmp_path / "a.jsonl"), tmp_path / "d")


@pytest.mark.parametrize("copy", COPIES[1:])
def test_validation_that_holds_a_copy_is_refused(tmp_path, copy):
    write(tmp_path / "t.jsonl", [*TEXTS, COPIES[0]])
    write(tmp_path / "v.jsonl", [copy])
    validation = str(tmp_path / "v.jsonl")
    message = failure(str(tmp_path / "t.jsonl"), tmp_path / "d", validation_source=validation)
    assert "'v.jsonl:1' of the validation source is the same text as 't.jsonl:61'" in message


def lines_of(name: str, size: int) -> str:
    return "".join(f"{name} {number} {number * 7919 % 1009}\n" for number in range(size // 14))


@pytest.mark.parametrize("fraction", [0.02, 0.1])
@pytest.mark.parametrize(
    "sizes",
    [(430, 570), range(10, 120, 11), (900, *[10] * 20), [80] * 12, (5, 600), (600, 2, 2, 2)],
    ids=["two", "ten", "one among many", "twelve alike", "a small one", "three small ones"],
)
def test_a_few_large_files_are_cut_and_the_fraction_is_kept(tmp_path, sizes, fraction):
    """No large file is held out whole, nor trained on whole: sizes in kilobytes."""
    texts = {f"{n}.txt": lines_of(f"file{n}", 1_000 * size) for n, size in enumerate(sizes)}
    spool = Spool(tmp_path / "source")
    spool.fill(Document(*each) for each in texts.items())
    split = split_by_hash(spool, fraction=fraction, seed=0, scratch=tmp_path / "parts")
    train, validation = (
        {d.name: d.text for d in side.spool.read(side.mask)}
        for side in (split.train, split.validation)
    )
    assert {name: train.get(name, "") + validation.get(name, "") for name in texts} == texts
    whole = sum(map(len, texts.values()))
    assert fraction / 2 <= split.validation.num_bytes / whole <= 2 * fraction
    for name, text in texts.items():
        if len(text) >= max(fraction, 0.1) * whole:
            assert train[name].endswith("\n")
            assert len(validation[name]) / len(text) == pytest.approx(fraction, rel=0.3)
    large = max(sizes) >= max(fraction, 0.1) * sum(sizes)
    assert large <= ("large documents" in split.rule)


def test_many_small_documents_are_never_cut(tmp_path):
    texts = [lines_of(f"file{n}", 2_000 + 40 * n) for n in range(200)]
    spool = Spool(tmp_path / "source")
    spool.fill(Document("name", text) for text in texts)
    split = split_by_hash(spool, fraction=0.02, seed=0, scratch=tmp_path / "parts")
    assert split.train.spool is split.validation.spool is spool
    assert 0.01 <= split.validation.num_bytes / spool.num_bytes <= 0.04
