"""The exception whose message a user reads, and hints that its message may end with."""

import difflib
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

_LONGEST = 1_000
"""Most characters of a message, which may quote text of any length from a file."""
_MOST = 1_000
"""Most files of a folder that a misspelled path is compared with, so that a hint takes no time."""
_HINTS = 3
"""Most names in a hint."""


class WakefulError(ValueError):
    """An error that the user can mend: the message says what is wrong and what to do.

    The command line prints the message, always one printable line, and exits with status 1; any
    other exception is a bug and keeps its traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class Interrupted(WakefulError):
    """Work was stopped from outside after saving its state; the message says how to continue."""

    def __init__(self, event: str, then: str) -> None:
        super().__init__(f"{event}; {then}")
        self.what = event
        """The event alone, for a caller whose own message says how to continue."""


class Diverged(WakefulError):
    """Training or a model gives numbers that are not finite, and would again when repeated."""


class WakefulWarning(UserWarning):
    """A warning about what was done, for the user; the command line prints it as one line."""


def warn(message: str) -> None:
    """Issue a `WakefulWarning` of one printable line, attributed to the caller's caller."""
    warnings.warn(WakefulWarning(one_line(message)), stacklevel=3)


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return a hint for a misspelled word: `" (did you mean 'x'?)"` with the closest of
    `candidates`, or "" where none is close.

    Up to three candidates that begin with the word are preferred to one that resembles it:
    `" (did you mean 'x1', 'x2' or 'x3'?)"`.
    """
    names = list(candidates)
    matches = [name for name in names if word and name.startswith(word)][:_HINTS]
    if not matches:
        matches = difflib.get_close_matches(word, names, n=1)
    if not matches:
        return ""
    *others, last = map(repr, matches)
    choices = f"{', '.join(others)} or {last}" if others else last
    return f" (did you mean {choices}?)"


def did_you_mean_path(path: str | Path) -> str:
    """Return the hint of `did_you_mean` for a path that does not exist, from the files of its
    folder; "" where the path exists or no name is close.
    """
    path = Path(path)
    try:
        names = [] if path.exists() else os.listdir(path.parent)
    except (OSError, ValueError):  # no folder, a name that is too long or has a zero byte
        return ""
    return did_you_mean(str(path), [str(path.parent / name) for name in names[:_MOST]])


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type where that is empty."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def one_line(message: str) -> str:
    """Return a message as one printable line: without control characters, and with its middle left
    out where it is longer than 1,000 characters.
    """
    if len(message) > _LONGEST:  # what to do stands at the end
        message = f"{message[: _LONGEST * 2 // 3]} [...] {message[-_LONGEST // 3 :]}"
    line = " ".join(message.splitlines())
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in line)
