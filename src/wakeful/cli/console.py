"""The command line's streams and the lines printed to them."""

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from wakeful.errors import WakefulError
from wakeful.terminal.plain_text import visible

_WIDE = 120
"""Columns where the output is not a terminal: a table loses nothing to a file."""

LET_IT_SPEAK = 2.0
"""Seconds before another process ends with an error: torchrun ends the first when one ends."""

_TERMINAL = sys.stdout is not None and sys.stdout.isatty()  # None where the caller closed it


class Printer(Console):
    """A console that sends a terminal no control character but its own styles'."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for part in super().render(renderable, options):
            text = part.text if part.control else visible(part.text, keep="\n\t")
            yield part._replace(text=text)


class LogRecord(logging.LogRecord):
    """What another library logs, which may quote a file."""

    def getMessage(self) -> str:
        return visible(super().getMessage(), keep="\n\t")


OUT = Printer(soft_wrap=True, width=None if _TERMINAL else _WIDE)
ERR = Printer(stderr=True, soft_wrap=True)


def another_speaks() -> bool:
    """Whether this is not the first of several processes that torchrun has started."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0"


def open_streams() -> None:
    """Make any text printable: to nowhere where a stream is closed, and escaped where its encoding
    lacks a character.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def tell(line: str) -> None:
    """Print a line as it is, as a path may hold what looks like markup; of several processes the
    first does.
    """
    if not another_speaks():
        OUT.print(line, highlight=False, markup=False)


def write(text: str) -> None:
    """Write text as it comes, its control characters visible, line ends and tabs as they are."""
    sys.stdout.write(visible(text, keep="\n\t"))
    sys.stdout.flush()


def standard_input() -> str:
    """Return all of standard input, which must be UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise WakefulError(f"standard input is not UTF-8: {error}") from None


def display(name: str) -> AbstractContextManager[Any]:
    """Show the progress of what is called `name`."""
    from wakeful.terminal.display import display as progress_display

    return progress_display(OUT, name)


def finish(result: Any, page: Path | None = None) -> None:
    """Print a verb's result and its page's path, if this process is the one that speaks."""
    if not another_speaks():
        OUT.print(result)
        if page is not None:
            tell(f"report: {page}")
