"""Streams of the command line."""

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
from wakeful.terminal.plain_text import escape_controls

_WIDE = 120
"""Columns of output that is not a terminal, wide enough for every table."""

SECONDS_FOR_FIRST = 2.0
"""Seconds that a secondary process waits before it fails: torchrun ends all processes when one
fails, and the first has an error to print."""

_TERMINAL = sys.stdout is not None and sys.stdout.isatty()  # None where the caller closed it


class Printer(Console):
    """A console that sends no control characters except those of its own styles."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render as `rich` does, with control characters of the text replaced by symbols."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else escape_controls(segment.text, keep="\n\t")
            yield segment._replace(text=text)


class LogRecord(logging.LogRecord):
    """A log record without control characters: other libraries may quote a file."""

    def getMessage(self) -> str:
        return escape_controls(super().getMessage(), keep="\n\t")


OUT = Printer(soft_wrap=True, width=None if _TERMINAL else _WIDE)
ERR = Printer(stderr=True, soft_wrap=True)


def is_secondary_process() -> bool:
    """Return True in all but the first of several processes of torchrun."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0"


def open_streams() -> None:
    """Make standard output and standard error accept any text. What goes to a closed stream is
    discarded; characters that the stream's encoding lacks are escaped.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_line(line: str) -> None:
    """Print a line in the first process only, literally: rich's markup has no effect."""
    if not is_secondary_process():
        OUT.print(line, highlight=False, markup=False)


def write_text(text: str) -> None:
    """Write and flush text, with control characters as symbols except line ends and tabs."""
    sys.stdout.write(escape_controls(text, keep="\n\t"))
    sys.stdout.flush()


def read_standard_input() -> str:
    """Return all of standard input, or raise `WakefulError` where it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise WakefulError(f"standard input is not UTF-8: {error}") from None


def progress_display(name: str) -> AbstractContextManager[Any]:
    """Return the progress display, on standard output, of the work called `name`."""
    from wakeful.terminal.display import open_display

    return open_display(OUT, name)


def print_result(result: Any, page: Path | None = None) -> None:
    """Print a verb's result and, if there is one, the path of its page; only the first process of
    several prints.
    """
    if not is_secondary_process():
        OUT.print(result)
        if page is not None:
            print_line(f"report: {page}")
