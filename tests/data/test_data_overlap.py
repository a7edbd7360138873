"""Passages of the validation text that training holds, and data without them."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakeful.data import overlap
from wakeful.data.overlap import PASSAGE, measure_overlap
from wakeful.data.preparing import prepare, prepare_data
from wakeful.data.tokens import PreparedData, TokenFile
from wakeful.errors import WakefulError


def tokens(*documents: list[int]) -> TokenFile:
    lengths = np.asarray([len(document) for document in documents])
    return TokenFile(
        tokens=np.asarray([i for document in documents for i in document], "<u2"),
        documents=(np.cumsum(lengths) - lengths).astype("<i8"),
        num_bytes=int(lengths.sum()),
        vocab_size=2**16,
        end_of_text=0,
        path=Path("train.tokens"),
    )


def by_search(train: list[int], document: list[int], length: int) -> float:
    passages = {tuple(train[n : n + length]) for n in range(len(train) - length + 1)}
    starts = range(0, len(document) - length + 1, length)
    found = [tuple(document[n : n + length]) in passages for n in starts]
    return sum(found) / len(found) if found else 0.0


ids = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(ids, st.lists(ids, min_size=1, max_size=4), st.integers(1, 6), st.sampled_from([1, 7, 99]))
def test_the_shares_are_those_of_a_plain_search(
    train: list[int], validation: list[list[int]], length: int, chunk: int
) -> None:
    before = overlap._CHUNK
    overlap._CHUNK = chunk
    try:
        found = measure_overlap(tokens(train), tokens(*validation), length=length)
    finally:
        overlap._CHUNK = before
    assert found.tolist() == pytest.approx([by_search(train, d, length) for d in validation])


def test_a_copied_passage_is_found_wherever_it_is() -> None:
    generator = np.random.default_rng(0)
    train = generator.integers(0, 60_000, 50_000).tolist()
    other = generator.integers(0, 60_000, 1_000).tolist()
    copied = other[:128] + train[777 : 777 + 128]
    shares = measure_overlap(tokens(train), tokens(other, copied, train[:64]), length=64)
    assert shares.tolist() == [0.0, 0.5, 1.0]


def corpus(folder: Path, tables: int) -> Path:
    """Write documents of random words, `tables` of which differ from each other in one line."""
    generator = np.random.default_rng(1)
    folder.mkdir()
    shared = " ".join(str(n) for n in generator.integers(0, 9999, 300))
    for number in range(30):
        words = " ".join(str(n) for n in generator.integers(0, 9999, 300))
        body = f"table {number}\n{shared}" if number < tables else words
        (folder / f"{number:02d}.txt").write_text(body)
    return folder


def texts(data: PreparedData) -> list[str]:
    """Return the validation documents' texts, decoded."""
    validation = data.validation
    starts = [*validation.documents.tolist(), validation.num_tokens]
    return [data.tokenizer.decode(validation.tokens[a:b].tolist())
            for a, b in itertools.pairwise(starts)]  # fmt: skip


def test_documents_that_overlap_are_left_out_of_validation(tmp_path: Path) -> None:
    source = corpus(tmp_path / "text", tables=12)
    settings = {"vocab_size": 300, "validation_fraction": 0.3, "cache_dir": tmp_path / "cache"}
    kept = prepare_data(str(source), **settings, keep_overlap=True)
    held = prepare_data(str(source), **settings)
    assert kept.folder != held.folder
    dropped = held.info["overlap"]
    assert 0 < dropped["documents"] < kept.info["splits"]["validation"]["documents"]
    assert "overlap" not in kept.info
    assert held.validation.num_tokens == kept.validation.num_tokens - dropped["tokens"]
    assert np.array_equal(held.train.tokens, kept.train.tokens)
    assert measure_overlap(held.train, held.validation, length=PASSAGE).max() == 0.0
    left = texts(held)
    assert left == [text for text in texts(kept) if not text.startswith("table")]
    assert held.validation.num_bytes == sum(len(text.encode()) for text in left)
    PreparedData.open(held.folder)
    assert sorted(path.name for path in held.folder.iterdir()) == sorted(
        path.name for path in kept.folder.iterdir()
    )


def test_a_clean_split_stays_as_it_is(tmp_path: Path) -> None:
    source = corpus(tmp_path / "text", tables=0)
    kept = prepare(str(source), tmp_path / "kept", vocab_size=300, keep_overlap=True)
    held = prepare(str(source), tmp_path / "held", vocab_size=300)
    assert held.info["overlap"] == {"passage": PASSAGE, "documents": 0, "tokens": 0}
    assert held.info["splits"] == kept.info["splits"]


def test_a_validation_text_that_overlaps_is_refused(tmp_path: Path) -> None:
    source = corpus(tmp_path / "text", tables=0)
    theirs, out = tmp_path / "validation.txt", tmp_path / "out"
    theirs.write_text((source / "03.txt").read_text() + " and more")
    with pytest.raises(WakefulError, match="document 0 with 100% of its passages of 64 tokens"):
        prepare(str(source), out, vocab_size=300, validation_source=str(theirs))
    all_tables = corpus(tmp_path / "tables", tables=30)
    with pytest.raises(WakefulError, match="every held-out document partly occurs in it"):
        prepare(str(all_tables), out, vocab_size=300)
    assert not out.exists()
    prepare(str(all_tables), out, vocab_size=300, keep_overlap=True)
