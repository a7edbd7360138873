"""JSON lines, read and refused."""

import json
from pathlib import Path

import pytest

from evaluation.models import CHOICES, LAMBADA, write_lines
from wakeful.errors import WakefulError
from wakeful.evaluation.examples import Completion, MultipleChoice, read_choices, read_lambada


def test_examples_are_read(tmp_path: Path) -> None:
    completions = read_lambada(write_lines(tmp_path / "l.jsonl", LAMBADA))
    assert completions[0] == Completion("the cat sat on the", " mat")
    assert len(completions) == len(LAMBADA)
    choices = read_choices(write_lines(tmp_path / "c.jsonl", CHOICES))
    assert choices[0] == MultipleChoice(
        "Question: which is a color?\nAnswer:", ("red", "a bird"), 0
    )
    assert choices[1].context == "She went to"
    assert choices[2].context == "Question: open a tin\nAnswer:"
    assert [choice.answer for choice in choices] == [0, 2, 1, 1]


def test_a_line_may_hold_other_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "l.jsonl"
    rows = "\n\n".join(json.dumps({"text": f"a\u2028b{n} c"}, ensure_ascii=False) for n in (1, 2))
    file.write_text("\ufeff" + rows + "\r\n", "utf-8")
    assert [each.context for each in read_lambada(file)] == ["a\u2028b1", "a\u2028b2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ('{"text": "a b"}\n{"text": "a b"', "line 2: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ('{"text": "a b"}\n\n[1]\n', "line 3: a JSON list"),
        ('{"words": "a b"}', "no field 'text' .fields: words"),
        ('{"text": 3}', "holds int, not text"),
        ('{"text": "\\ud800 b"}', "half a surrogate"),
        ('{"text": "word"}', "a space before the last"),
        ('{"text": "two words "}', "a space before the last"),
        ('{"text": " word"}', "a space before the last"),
        ('{"text": ""}', "'text' is empty"),
    ],
)
def test_bad_completions_are_named_by_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "l.jsonl"
    file.write_text(content)
    with pytest.raises(WakefulError, match=message) as raised:
        read_lambada(file)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "choices": ["a", "b"]}, "no field 'answer', the number"),
        ({"goal": "g", "sol1": "a", "sol2": "b"}, "no field 'label'"),
        ({"goal": "g", "sol1": "a", "label": 0}, "no field 'sol2'"),
        ({"question": "q", "choices": ["a", "b"], "answer": 2}, "answer 2 is not one of 0 to 1"),
        ({"question": "q", "choices": ["a", "b"], "answer": -1}, "answer -1 is not"),
        ({"question": "q", "choices": ["a", "b"], "answer": "a"}, "answer 'a' is not"),
        ({"question": "q", "choices": ["a", "b"], "answer": True}, "answer True is not"),
        ({"question": "q", "choices": ["a"], "answer": 0}, "at least two"),
        ({"question": "q", "choices": "ab", "answer": 0}, "at least two"),
        ({"question": "q", "choices": ["a", 1], "answer": 0}, r"choices\[1\].* holds int"),
        ({"question": "q", "choices": ["a", " "], "answer": 0}, r"choices\[1\].* is empty"),
        ({"question": "", "choices": ["a", "b"], "answer": 0}, "'question' is empty"),
        ({"question": "q", "context": "c", "choices": ["a", "b"], "answer": 0}, "either question"),
        ({"choices": ["a", "b"], "answer": 0}, "either question or context; it has answer"),
    ],
)
def test_bad_choices_are_named_by_line(tmp_path: Path, row: dict, message: str) -> None:
    file = write_lines(tmp_path / "c.jsonl", [CHOICES[0], row])
    with pytest.raises(WakefulError, match=message) as raised:
        read_choices(file)
    assert str(raised.value).startswith(f"{file}, line 2: ")


def test_files_that_are_no_text(tmp_path: Path) -> None:
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"text": "caf\xe9 b"}')
    with pytest.raises(WakefulError, match="not UTF-8 text at byte 13"):
        read_lambada(latin)
    with pytest.raises(WakefulError, match=r"cannot read .*No such file"):
        read_lambada(tmp_path / "none.jsonl")
    with pytest.raises(WakefulError, match=r"cannot read .*directory"):
        read_choices(tmp_path)
