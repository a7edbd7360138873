"""The beginning of a text."""

from pathlib import Path

import pytest

from wakeful.data.beginning import beginning_of
from wakeful.errors import WakefulError


def test_as_much_is_read_as_the_tokens_can_need(tmp_path: Path) -> None:
    for number, letter in enumerate("abc"):
        (tmp_path / f"{number}.txt").write_text(letter * 640)
    folder = str(tmp_path)
    whole = "\n".join(letter * 640 for letter in "abc")
    assert beginning_of(folder, 0) == whole
    assert beginning_of(folder, 5) == "a" * 320
    assert beginning_of(folder, 15) == whole[:960]
    assert beginning_of(folder, 10_000) == whole


def test_documents_after_enough_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("a" * 640)
    (tmp_path / "1.txt").write_bytes(b"\xff\xfe\xff")
    assert beginning_of(str(tmp_path), 10) == "a" * 640
    with pytest.raises(WakefulError, match=r"1\.txt"):
        beginning_of(str(tmp_path), 11)
