"""Progress on the terminal: bars where there is one, a line every ten seconds where there is none.

Text may come from a file: control characters are printed as symbols.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from wakeful.terminal.plain_text import escape_controls

_SECONDS_BETWEEN_LINES = 10.0
LONG_SECONDS = 30.0
"""Seconds of estimated work from which the estimate is shown."""


class Display:
    """Progress of a verb; this base class shows nothing."""

    def begin(self, done: int, total: int, description: str) -> None:
        """Announce `total` training steps, `done` of them finished."""

    def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None:
        """Report a finished training step."""

    def note(self, text: str) -> None:
        """Print one line."""

    def stage(self, name: str, done: int, total: int | None) -> None:
        """Report progress in bytes of text, such as of preparing data."""

    def count(self, name: str, done: int, total: int) -> None:
        """Report progress in units such as sequences; a `total` of 0 is unknown."""


OnProgress = Callable[[int, int], None]
"""Progress callback, called with the units done and their total."""


def ignore_progress(done: int, total: int) -> None:
    """Ignore progress: the default callback."""


DisplayFactory = Callable[[str], AbstractContextManager[Display]]
"""Function that returns the display of the work with this name."""


class ProgressBars(Display):
    """A progress bar for each kind of work, with its figures and the time left."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress, self._name = progress, name
        self._tasks: dict[str, TaskID] = {}

    def begin(self, done: int, total: int, description: str) -> None:
        self.note(f"{self._name}: {description}")
        self._update_bar(self._name, done, total, f"{done}/{total}")

    def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None:
        """Move the bar of training to a finished step, with its loss and speed."""
        text = f"{done}/{total}  loss {loss:6.3f}  {tokens_per_second:8,.0f} tokens/s"
        self._update_bar(self._name, done, total, text)

    def note(self, text: str) -> None:
        self._progress.console.print(escape_controls(text), highlight=False, markup=False)

    def stage(self, name: str, done: int, total: int | None) -> None:
        if done or total:
            self._update_bar(name, done, total, format_size(done, total))

    def count(self, name: str, done: int, total: int) -> None:
        self._update_bar(name, done, total or None, f"{done}/{total}" if total else str(done))

    def _update_bar(self, name: str, done: int, total: int | None, text: str) -> None:
        """Move the bar of the work called `name`, adding it first where there is none."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(
                escape_controls(name), total=total, figures=""
            )
        self._progress.update(self._tasks[name], completed=done, total=total, figures=text)


class ProgressLines(Display):
    """Progress as a printed line every few seconds, for logs."""

    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name = console, name
        self._last_line_time: dict[str, float] = {}
        self._starts: dict[str, tuple[float, int]] = {}  # by name: time, and units already done

    def begin(self, done: int, total: int, description: str) -> None:
        self._starts[self._name] = (time.monotonic(), done)
        self.note(f"{self._name}: {description}")

    def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None:
        """Print a finished training step, with its loss, speed and the time left, if it is time."""
        if self._is_line_due(self._name, done, total):
            time_left = self._time_left(self._name, done, total)
            self.note(
                f"{self._name}: step {done}/{total}  loss {loss:.3f}  "
                f"{tokens_per_second:,.0f} tokens/s{time_left}"
            )

    def note(self, text: str) -> None:
        self._console.print(escape_controls(text), highlight=False, markup=False, soft_wrap=True)

    def stage(self, name: str, done: int, total: int | None) -> None:
        if (done or total) and self._is_line_due(name, done, total):
            self.note(f"{name}: {format_size(done, total)}")

    def count(self, name: str, done: int, total: int) -> None:
        if self._is_line_due(name, done, total):
            total_text = f" of {total}" if total else ""
            self.note(f"{name} {done}{total_text}{self._time_left(name, done, total)}")

    def _is_line_due(self, name: str, done: int, total: int | None) -> bool:
        """Return True if a line is to be printed: for the first and the last report of the work
        called `name`, and when its last line is `_SECONDS_BETWEEN_LINES` old.

        Remembers the time of the line, and the work's start.
        """
        now = time.monotonic()
        self._starts.setdefault(name, (now, done))
        last = self._last_line_time.get(name)
        if last is not None and now - last < _SECONDS_BETWEEN_LINES and done != total:
            return False
        self._last_line_time[name] = now
        return True

    def _time_left(self, name: str, done: int, total: int) -> str:
        """Return the estimated time left; "" before any progress, for an unknown total (0) and at
        the end.
        """
        start_time, start_done = self._starts[name]
        if done <= start_done or not total or done == total:
            return ""
        seconds_per_unit = (time.monotonic() - start_time) / (done - start_done)
        return f"  {format_duration(seconds_per_unit * (total - done))} left"


def format_size(done: int, total: int | None) -> str:
    """Format bytes done and their total in a common unit: "1.2 of 3.0 MB"; without a total that is
    unknown or reached, "3.0 MB".
    """
    largest = max(done, total or 0)
    unit, scale, decimals = "bytes", 1.0, 0
    for larger_unit, larger_scale in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if largest >= larger_scale:
            unit, scale, decimals = larger_unit, larger_scale, 1
    total_text = f" of {total / scale:.{decimals}f}" if total and total != done else ""
    return f"{done / scale:.{decimals}f}{total_text} {unit}"


def format_duration(seconds: float) -> str:
    """Format seconds in the unit that suits them: "40 s", "4 min", "2.5 h", "3.1 days"."""
    if seconds < 99.5:  # up to "99 s"
        return f"{max(1, round(seconds))} s"
    if seconds < 5_700:  # 95 minutes
        return f"{seconds / 60:.0f} min"
    if seconds < 170_000:  # 47 hours
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86_400:.1f} days"


@contextlib.contextmanager
def open_display(console: Console, name: str) -> Iterator[Display]:
    """Yield the progress display of the work called `name`: bars on a terminal, else lines."""
    if not console.is_terminal:
        yield ProgressLines(console, name)
        return
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console) as progress:
        yield ProgressBars(progress, name)


def default_display(name: str) -> AbstractContextManager[Display]:
    """Return the display of calls from Python: bars on a terminal, else none."""
    console = Console(stderr=True)
    return open_display(console, name) if console.is_terminal else contextlib.nullcontext(Display())
