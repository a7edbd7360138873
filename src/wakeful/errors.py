"""The one exception a user is meant to read, and the hint that it may end with."""

import difflib
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

_LONGEST = 1_000
"""Characters of a message; what it quotes may come from a file, and be of any length."""
_MOST = 1_000
"""Files beside a path that are compared with it: a hint is worth no waiting."""
_HINTS = 3
"""Names that begin with what was written, at most."""


class WakefulError(ValueError):
    """Something the user can mend: the message says what is wrong and what to do.

    The command line prints it as one line and exits with status 1; any other exception is a bug
    and keeps its traceback. Whatever a message quotes, it is one printable line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class Interrupted(WakefulError):
    """Work was stopped from outside and saved what it had; the message says how to go on."""

    def __init__(self, event: str, then: str) -> None:
        super().__init__(f"{event}; {then}")
        self.what = event
        """The event, without how to continue: a caller that started more work says that itself."""


class Diverged(WakefulError):
    """Numbers are not finite, nor would be again: training's settings or a model are at fault."""


class WakefulWarning(UserWarning):
    """Something the user should know of what was done; the command line prints it as one line."""


def warn(message: str) -> None:
    """Warn whoever called, in one printable line."""
    warnings.warn(WakefulWarning(one_line(message)), stacklevel=3)


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the closest known word, or an empty string.

    The first few that begin with the word come before all that only resemble it:
    `" (did you mean 'x1', 'x2' or 'x3'?)"`.
    """
    names = list(candidates)
    matches = [repr(name) for name in names if word and name.startswith(word)][:_HINTS]
    matches = matches or [repr(name) for name in difflib.get_close_matches(word, names, n=1)]
    if not matches:
        return ""
    *first, last = matches
    return f" (did you mean {', '.join(first)}{' or ' if first else ''}{last}?)"


def did_you_mean_path(path: str | Path) -> str:
    """Return that hint for a path that is not there, to what is beside it, or an empty string."""
    there = Path(path)
    try:
        names = [] if there.exists() else os.listdir(there.parent)
    except (OSError, ValueError):  # no folder, a name that is too long or has a zero byte
        return ""
    return did_you_mean(str(there), [str(there.parent / name) for name in names[:_MOST]])


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type where it says nothing."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def one_line(message: str) -> str:
    """Return a message without what would break its line or steer a terminal, and not too long."""
    if len(message) > _LONGEST:  # the cure stands at the end
        message = f"{message[: _LONGEST * 2 // 3]} [...] {message[-_LONGEST // 3 :]}"
    line = " ".join(message.splitlines())
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in line)
