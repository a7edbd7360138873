"""The user's JSON lines, read and checked: every complaint names the file and the line.

LAMBADA          {"text": "... the last word"}
multiple choice  {"goal": ..., "sol1": ..., "sol2": ..., "label": 0}  PIQA
                 {"question": ..., "choices": [...], "answer": 1}  any number of choices, from 0
                 {"context": ..., "choices": [...], "answer": 1}   a text that a choice continues
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wakeful.data.readers import check_text, convert_os_errors, read_json_lines
from wakeful.errors import WakefulError

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task


@dataclass(frozen=True)
class Completion:
    """A text without its last word, which the model predicts."""

    context: str
    target: str
    """With the space before it."""


@dataclass(frozen=True)
class MultipleChoice:
    """A context, what could follow it, and which of these does."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class TaskSet:
    """Tasks and groups that lm-eval runs."""

    tasks: "Mapping[str, Task]" = field(default_factory=dict)
    groups: "Mapping[str, Group]" = field(default_factory=dict)
    """The requested groups and the groups inside them."""
    named: frozenset[str] = frozenset()
    """Names that were requested directly or by a tag, not as parts of a group."""


def read_lambada(path: str | Path) -> list[Completion]:
    """Return the examples of a LAMBADA file.

    Raises:
        WakefulError: the file is missing, empty, not UTF-8 or not JSON lines, or a text has no last
            word after a space.
    """
    examples: list[Completion] = []
    for location, row in _read_rows(path):
        text = _read_field(row, "text", location)
        context, space, word = text.rpartition(" ")
        if not space or not context.strip() or not word.strip():
            raise WakefulError(
                f"{location}: the text must be words with a space before the last, and end with it"
            )
        examples.append(Completion(context, f" {word}"))
    return examples


def read_choices(path: str | Path) -> list[MultipleChoice]:
    """Return the examples of a multiple-choice file.

    Raises:
        WakefulError: the file is missing, empty, not UTF-8 or not JSON lines; or a row has none of
            the forms, or an answer that is not a choice.
    """
    examples: list[MultipleChoice] = []
    for location, row in _read_rows(path):
        answer_field = "label" if "goal" in row else "answer"  # "goal" and "label" are PIQA's names
        context, choices = _read_question(row, location)
        if answer_field not in row:
            raise WakefulError(
                f"{location}: no field {answer_field!r}, the number of the right choice"
            )
        answer = row[answer_field]
        # `isinstance` would accept true and false, which are integers in Python.
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise WakefulError(
                f"{location}: the answer {answer!r} is not one of 0 to {len(choices) - 1}"
            )
        examples.append(MultipleChoice(context, choices, answer))
    return examples


def _read_question(row: dict[str, Any], location: str) -> tuple[str, tuple[str, ...]]:
    """Return a row's context, as the model reads it, and its choices.

    A row has PIQA's fields goal, sol1 and sol2, or choices and either a question or a context that
    a choice continues. `location` names the file and line in errors.

    Raises:
        WakefulError: a field is missing or is not text.
    """
    if "goal" in row:
        choices = (_read_field(row, "sol1", location), _read_field(row, "sol2", location))
        return f"Question: {_read_field(row, 'goal', location)}\nAnswer:", choices
    names = [name for name in ("question", "context") if name in row]
    if len(names) != 1:
        raise WakefulError(
            f"{location}: needs goal, sol1 and sol2, or choices with either question or context; "
            f"it has {', '.join(sorted(row))[:200] or 'no field'}"
        )
    listed = row.get("choices")
    if not isinstance(listed, list) or len(listed) < 2:
        raise WakefulError(f"{location}: choices must be a list of at least two texts")
    choices = tuple(
        _check_nonblank_text(choice, location, f"choices[{index}]")
        for index, choice in enumerate(listed)
    )
    context = _read_field(row, names[0], location)
    if names == ["question"]:
        context = f"Question: {context}\nAnswer:"
    return context, choices


def _read_field(row: dict[str, Any], name: str, location: str) -> str:
    """Return the text in a row's field `name`; raise `WakefulError` if it is missing, blank or no
    text.
    """
    if name not in row:
        raise WakefulError(
            f"{location}: no field {name!r} (fields: {', '.join(sorted(row))[:200] or 'none'})"
        )
    return _check_nonblank_text(row[name], location, name)


def _check_nonblank_text(value: object, location: str, name: str) -> str:
    """Return `value`, the field `name` of a row; raise `WakefulError` if it is blank or no text."""
    text = check_text(value, location, name)
    if not text.strip():
        raise WakefulError(f"{location}: field {name!r} is empty")
    return text


def _read_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield for each line of a JSON Lines file its location, "file, line n", and its JSON object.

    Raises:
        WakefulError: the file cannot be read or is empty, or a line is not a JSON object.
    """
    with convert_os_errors(f"cannot read {path}"):
        rows = list(read_json_lines(Path(path)))
    if not rows:
        raise WakefulError(f"{path} is empty: it has no example")
    for _, location, row in rows:
        if not isinstance(row, dict):
            raise WakefulError(f"{location}: a JSON {type(row).__name__}, not an object")
        yield location, row
