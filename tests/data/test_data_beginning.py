"""The beginning of a text."""

from pathlib import Path

import pytest

from wakeful.data.sources import Beginning, beginning_of
from wakeful.errors import WakefulError


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def lines(text: str) -> list[int]:
    """A tokenizer whose tokens are as long as lines are."""
    return [len(line) for line in text.split("\n")]


def test_no_more_is_read_than_the_tokens_need(tmp_path: Path) -> None:
    for number, letter in enumerate("abc"):
        (tmp_path / f"{number}.txt").write_text(letter * 640)
    folder = str(tmp_path)
    whole = "\n".join(letter * 640 for letter in "abc")
    assert beginning_of(folder, 0).text == whole
    assert beginning_of(folder, 10).text == "a" * 640
    assert beginning_of(folder, 11).text == whole[:1281]
    assert beginning_of(folder, 5).tokens(letters, 5) == [ord("a")] * 5
    assert beginning_of(folder, 5).text_of(letters, 5) == "a" * 320
    assert beginning_of(folder, 9).text_of(letters, 0) == whole


def test_documents_after_enough_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("a" * 640)
    (tmp_path / "1.txt").write_bytes(b"\xff\xfe\xff")
    assert beginning_of(str(tmp_path), 10).tokens(letters, 10) == [ord("a")] * 10
    with pytest.raises(WakefulError, match=r"1\.txt"):
        beginning_of(str(tmp_path), 11)


def test_tokens_of_any_length_are_read_on_for(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("x" * (500 + number))
    beginning = beginning_of(str(tmp_path), 6)
    assert len(beginning.text) < 6 * 500
    assert beginning.tokens(lines, 6) == [500, 501, 502, 503, 504, 505]
    # The next is there too, or the sixth could have been cut short.
    assert len(beginning.text) < sum(range(500, 509))
    assert beginning.tokens(lines, 100) == list(range(500, 509))
    assert Beginning("a\n" * 99).tokens(lines, 3) == [1, 1, 1]
