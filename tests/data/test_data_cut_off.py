"""Preparation that is cut off or finds its folder taken or damaged."""

import json
import resource
import shutil
from contextlib import contextmanager

import numpy as np
import pytest

from data.preparations import failure, left_over, write
from wakeful.data import PreparedData, Tokenizer, prepare, preparing
from wakeful.errors import WakefulError


def test_a_folder_that_is_not_ours_is_left_alone(source, tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "letter.txt").write_text("dear")
    assert "exists: choose another folder" in failure(source, folder)
    assert "exists: choose another folder" in failure(source, source)
    assert (folder / "letter.txt").read_text() == "dear"
    (folder / "letter.txt").unlink()
    assert prepare(source, folder, vocab_size=300).train.num_tokens  # an empty folder is free


def test_a_folder_inside_its_source_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert "inside its source" in failure(str(tmp_path), tmp_path / "data")


def test_two_at_once(source, tmp_path, monkeypatch):
    """Another process moves the same data in while ours is being built."""
    other = prepare(source, tmp_path / "other", vocab_size=300)
    publish_folder = preparing.publish_folder

    def late(building, folder, info):
        shutil.copytree(other.folder, folder)
        publish_folder(building, folder, info)

    monkeypatch.setattr(preparing, "publish_folder", late)
    assert prepare(source, tmp_path / "d", vocab_size=300).info == other.info
    assert not left_over(tmp_path)


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
        message = failure(str(tmp_path / "a.jsonl"), tmp_path / "x" / "d", tokenizer=tokenizer)
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
        PreparedData.open(folder)
    assert "\n" not in str(caught.value)


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
        PreparedData.open(folder).split("test")
