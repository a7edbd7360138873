"""Mixtures: shares to the window, the order sought and resumed, validation domain by domain."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from wakeful.config.schema import DataConfig
from wakeful.data.mixture import BLOCK, MixedBatches, MixedTokens, mixture_of
from wakeful.data.order import ValidationWindows
from wakeful.data.preparing import load_data, load_mixture, prepare, reopen_data
from wakeful.data.sources import read_documents
from wakeful.data.tokens import PreparedData, TokenFile, is_prepared
from wakeful.errors import WakefulError

SOURCE = 'mixture(parts=[("a", "x", 6), ("b", "y", 3), ("c", "z", 1)])'


def part(size: int, first: int) -> TokenFile:
    """Tokens that say where they stand, from `first` on."""
    return TokenFile(
        tokens=np.arange(first, first + size, dtype="<u4"), documents=np.zeros(1, np.int64),
        num_bytes=size, vocab_size=10**6, end_of_text=0, path=Path("train.tokens"),
    )  # fmt: skip


def tokens(*sizes: int) -> MixedTokens:
    domains = mixture_of(SOURCE)
    assert domains is not None
    return MixedTokens(domains, [part(size, 100_000 * n) for n, size in enumerate(sizes)])


def write_words(tmp_path: Path, **words: str) -> None:
    """Write a folder of texts for each word."""
    for name, word in words.items():
        (tmp_path / name).mkdir()
        for number in range(30):
            (tmp_path / name / f"{number}.txt").write_text(f"{word} {number} " * (number + 3))


@pytest.mark.slow
def test_shares_are_exact_and_each_window_comes_once_an_epoch_of_its_domain() -> None:
    batches = MixedBatches(tokens(70, 900, 3000), length=10, batch_size=100, seed=5)
    owners = np.concatenate([
        batches.assign_domains(step * 100 + np.arange(100))[0] for step in range(2 * BLOCK // 100)
    ])  # fmt: skip
    for block in (owners[:BLOCK], owners[BLOCK:]):
        assert np.bincount(block).tolist() == [6000, 3000, 1000]
    # Not the same order in each block, and mixed within a batch's length.
    assert (owners[:BLOCK] != owners[BLOCK:]).any()
    assert 40 < np.bincount(owners[:100])[0] < 80
    _, places = batches.assign_domains(np.arange(2 * BLOCK))
    for domain, count in enumerate([12_000, 6000, 2000]):
        assert sorted(places[owners == domain]) == list(range(count))
    rows = np.concatenate([batches.batch(step).numpy() for step in range(40)])
    assert (np.diff(rows, axis=1)[rows[:, 0] >= 100_000] % 10**6 != 0).all()
    seen = rows[(rows >= 200_000).all(1)][:300]
    assert len({row[0] for row in seen.tolist()}) == len(seen)  # 300 windows, fewer than an epoch


def test_the_order_hangs_on_seed_and_step_alone_however_many_processes() -> None:
    sizes = (50, 400, 120)
    whole = MixedBatches(tokens(*sizes), length=8, batch_size=12, seed=3)
    later = MixedBatches(tokens(*sizes), length=8, batch_size=12, seed=3)
    assert (later.batch(777) == whole.batch(777)).all()
    shares = [
        MixedBatches(tokens(*sizes), length=8, batch_size=12, seed=3, rank=rank, world_size=3)
        for rank in range(3)
    ]
    assert (
        np.concatenate([each.batch(9).numpy() for each in shares]) == whole.batch(9).numpy()
    ).all()
    other = MixedBatches(tokens(*sizes), length=8, batch_size=12, seed=4)
    assert (other.batch(0) != whole.batch(0)).any()


def test_rows_stay_in_their_domain() -> None:
    rows = tokens(7, 9, 20).read(np.array([0, 6, 7, 15, 16]), 4)
    assert rows.tolist() == [
        [0, 1, 2, 3], [6, 0, 1, 2], [100_000, 100_001, 100_002, 100_003],
        [100_008, 100_000, 100_001, 100_002], [200_000, 200_001, 200_002, 200_003],
    ]  # fmt: skip


def test_validation_predicts_every_token_of_every_domain_once() -> None:
    sizes = (21, 5, 2)
    windows = ValidationWindows(tokens(*sizes), length=4, batch_size=3)
    targets = [row for _, batch in windows for row in batch.tolist()]
    found = [target for row in targets for target in row if target >= 0]
    assert found == [*range(1, 21), *range(100_001, 100_005), 200_001]
    assert windows.domains() == ["a"] * 5 + ["b", "c"]
    assert windows.num_windows == len(targets) == 7
    assert windows.num_predicted == len(found)
    inputs = [row for batch, _ in windows for row in batch.tolist()]
    assert inputs[5] == [100_000, 100_001, 100_002, 100_003]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('mixture(parts=[("a", "x", 1)])', "two parts or more"),
        ('mixture(parts=[("a", "x", 1), ("a", "y", 1)])', "of its own name"),
        ('mixture(parts=[("a b", "x", 1), ("c", "y", 1)])', "letters and digits"),
        ('mixture(parts=[("a", "x", 0), ("c", "y", 1)])', "must be positive and below 1e9, got 0"),
        ('mixture(parts=[("a", "x"), ("c", "y", 1)])', "parts must be"),
        ("mixture(of=[])", "no option 'of'"),
        (f'mixture(parts=[("a", {SOURCE!r}, 1), ("c", "y", 1)])', "a mixture itself"),
    ],
)
def test_what_is_no_mixture_is_refused(source: str, message: str) -> None:
    with pytest.raises(WakefulError, match=message):
        mixture_of(source)


def test_a_mixture_is_not_prepared_as_one_text(tmp_path: Path) -> None:
    source = 'mixture(parts=[("a", "x.txt", 1), ("b", "y.txt", 1)])'
    with pytest.raises(WakefulError, match="prepare a part by itself"):
        prepare(source, tmp_path / "out", vocab_size=300)
    assert not (tmp_path / "out").exists()


def test_what_is_not_written_as_a_mixture_is_none() -> None:
    assert mixture_of("mixture") is None
    assert mixture_of("texts/mixture.txt") is None


def test_domains_are_prepared_apart_with_one_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    write_words(tmp_path, one="apples", two="pears")
    source = f'mixture(parts=[("one", "{tmp_path}/one", 3), ("two", "{tmp_path}/two", 1)])'
    config = DataConfig(source=source, vocab_size=300, validation_fraction=0.2, keep_overlap=True)
    data = load_mixture(config, source)
    assert data is not None
    assert [each.share for each in data.domains] == [0.75, 0.25]
    for split in (data.train, data.validation):
        for file, word in zip(split.parts, ("apples", "pears"), strict=True):
            assert word in data.tokenizer.decode(file.tokens.tolist())
    assert len({part.info["tokenizer"]["fingerprint"] for part in data.parts}) == 1
    again = load_mixture(config, source)
    assert again is not None
    assert again.info == data.info
    heavier = load_mixture(config, source.replace("3)", "5)"))
    assert heavier is not None
    assert heavier.corpus_sha256 != data.corpus_sha256
    with pytest.raises(WakefulError, match="validation_source = 'x' does nothing"):
        load_mixture(DataConfig(source=source, validation_source="x"), source)
    whole = load_mixture(DataConfig(source=data.prepared_source), data.prepared_source)
    assert whole is not None
    assert whole.prepared_source == data.prepared_source
    assert whole.info["corpora_sha256"] == data.info["corpora_sha256"]
    found = reopen_data(DataConfig(source=data.prepared_source))
    assert found is not None
    assert found.info["splits"] == data.info["splits"]
    shutil.rmtree(data.parts[1].folder)
    assert reopen_data(DataConfig(source=data.prepared_source)) is None


def test_a_part_may_be_prepared_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    write_words(tmp_path, one="apples", two="pears")
    folder, size = tmp_path / "prepared", 300
    there = prepare(str(tmp_path / "one"), folder, vocab_size=size, validation_fraction=0.2,
                    keep_overlap=True)  # fmt: skip
    source = f'mixture(parts=[("two", "{tmp_path}/two", 1), ("one", "{folder}", 3)])'
    config = DataConfig(source=source, validation_fraction=0.3, keep_overlap=True)
    data = load_mixture(config, source)
    assert data is not None
    # Its tokenizer is that of all, and what it holds out stays.
    assert data.tokenizer.same_tokens(there.tokenizer)
    assert data.parts[1].info == there.info
    assert "pears" in data.tokenizer.decode(data.parts[0].train.tokens.tolist())
    data.check_config(dataclasses.replace(config, max_bytes=5))  # it is for the other part
    twice = f'mixture(parts=[("one", "{folder}", 3), ("again", "{folder}", 1)])'
    every = load_mixture(dataclasses.replace(config, source=twice), twice)
    assert every is not None
    with pytest.raises(WakefulError, match=r"max_bytes = 5 does nothing: .*prepared' is"):
        every.check_config(dataclasses.replace(config, source=twice, max_bytes=5))
    other = tmp_path / "other"
    prepare(str(tmp_path / "two"), other, vocab_size=301, keep_overlap=True)
    both = f'mixture(parts=[("one", "{folder}", 3), ("two", "{other}", 1)])'
    with pytest.raises(WakefulError, match=r"two, .*other, was prepared with another tokenizer"):
        load_mixture(config, both)
    with pytest.raises(WakefulError, match=r"one, .*prepared, was prepared with another tokenizer"):
        load_mixture(config, source, tokenizer=PreparedData.open(other).tokenizer)


def test_spread_rows_are_dealt_by_share_and_take_turns() -> None:
    found = tokens(70, 900, 3000)
    assert found.read(found.spread_starts(10, 10), 10)[:, 0].tolist() == [
        0, 100_000, 10, 20, 100_300, 200_000, 30, 40, 100_600, 50,
    ]  # fmt: skip
    assert len(found.spread_starts(10, 10, within=49)) == 4
    # A part gives what it has: seven rows of the twelve that are its share.
    rows = found.read(found.spread_starts(20, 10), 10)
    assert np.bincount(rows[:, 0] // 100_000).tolist() == [7, 6, 2]
    assert (np.diff(rows) == 1).all()
    alone = part(125, 0)
    assert alone.spread_starts(99, 10).tolist() == [*range(0, 120, 10)]
    assert alone.spread_starts(5, 10).tolist() == [0, 20, 40, 70, 90]
    assert alone.spread_starts(2, 10, within=49).tolist() == [0, 20]
    assert alone.spread_starts(2, 200).tolist() == []


def test_parts_of_the_standard_library_are_sources() -> None:
    names = [document.name for document in read_documents("python-stdlib:json/*")]
    assert "json/decoder.py" in names
    assert all(name.startswith("json/") for name in names)
    with pytest.raises(WakefulError, match="no file of the standard library matches nothing/"):
        list(read_documents("python-stdlib:nothing/*"))


def test_home_is_where_a_folder_of_tokens_may_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_words(tmp_path, one="apples")
    prepare(str(tmp_path / "one"), tmp_path / "there", vocab_size=300, keep_overlap=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = load_data(DataConfig(source="~/there"))
    assert found.prepared_source == str(tmp_path / "there")
    assert not is_prepared(Path("~nobody-of-that-name/there"))
