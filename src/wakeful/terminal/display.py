"""Progress on the terminal: bars where there is one, a line now and then where there is none.

What is said may come from a folder: its control characters are drawn, not sent.
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

from wakeful.terminal.plain_text import visible

_SECONDS_BETWEEN_LINES = 10.0
LONG = 30.0
"""Seconds of work before which it is said how long it may take."""


class Display:
    """The progress of a verb; this one says nothing."""

    def begin(self, done: int, total: int, what: str, loss: str = "loss") -> None:
        """Announce `total` training steps, `done` of which are there, before the next begins; and
        what the loss of each is.
        """

    def step(
        self, done: int, total: int, loss: float, tokens_per_second: float, mfu: float | None = None
    ) -> None:
        """Report a finished training step; `mfu` is the share of the devices' peak that it took."""

    def note(self, text: str) -> None:
        """Say one line."""

    def stage(self, name: str, done: int, total: int | None) -> None:
        """Report work on bytes of text, such as preparing data."""

    def count(self, name: str, done: int, total: int) -> None:
        """Report work on things that are counted, such as sequences; `total` 0 is unknown."""


Silent = Display
Passed = Callable[[int, int], None]
"""Is told how many of how many are done."""


def unseen(done: int, total: int) -> None:
    """Show no progress."""


DisplayFactory = Callable[[str], AbstractContextManager[Display]]
"""Gives the display for the work that is called so."""


def _share(mfu: float | None) -> str:
    return "" if mfu is None else f", MFU {mfu:.1%}"


class Bars(Display):
    """A rich progress bar a kind of work, each with its figures and the time left."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress, self._name, self._loss = progress, name, "loss"
        self._tasks: dict[str, TaskID] = {}

    def begin(self, done: int, total: int, what: str, loss: str = "loss") -> None:
        self._loss = loss
        self.note(f"{self._name}: {what}")
        self._update(self._name, done, total, f"{done}/{total}")

    def step(
        self, done: int, total: int, loss: float, tokens_per_second: float, mfu: float | None = None
    ) -> None:
        text = f"{done}/{total}  {self._loss} {loss:6.3f}  {tokens_per_second:8,.0f} tokens/s"
        text += _share(mfu)
        self._update(self._name, done, total, text)

    def note(self, text: str) -> None:
        self._progress.console.print(visible(text), highlight=False, markup=False)

    def stage(self, name: str, done: int, total: int | None) -> None:
        if done or total:
            self._update(name, done, total, size_of(done, total))

    def count(self, name: str, done: int, total: int) -> None:
        self._update(name, done, total or None, f"{done}/{total}" if total else str(done))

    def _update(self, name: str, done: int, total: int | None, text: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(visible(name), total=total, figures="")
        self._progress.update(self._tasks[name], completed=done, total=total, figures=text)


class Lines(Display):
    """One line every few seconds, for logs."""

    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name, self._loss = console, name, "loss"
        self._last: dict[str, float] = {}
        self._began: dict[str, tuple[float, int]] = {}

    def begin(self, done: int, total: int, what: str, loss: str = "loss") -> None:
        self._loss = loss
        self._began[self._name] = (time.monotonic(), done)
        self.note(f"{self._name}: {what}")

    def step(
        self, done: int, total: int, loss: float, tokens_per_second: float, mfu: float | None = None
    ) -> None:
        if self._due(self._name, done, total):
            left = self._left(self._name, done, total)
            self.note(
                f"{self._name}: step {done}/{total}  {self._loss} {loss:.3f}  "
                f"{tokens_per_second:,.0f} tokens/s{_share(mfu)}{left}"
            )

    def note(self, text: str) -> None:
        self._console.print(visible(text), highlight=False, markup=False, soft_wrap=True)

    def stage(self, name: str, done: int, total: int | None) -> None:
        if (done or total) and self._due(name, done, total):
            self.note(f"{name}: {size_of(done, total)}")

    def count(self, name: str, done: int, total: int) -> None:
        if self._due(name, done, total):
            of = f" of {total}" if total else ""
            self.note(f"{name} {done}{of}{self._left(name, done, total)}")

    def _due(self, name: str, done: int, total: int | None) -> bool:
        """Tell whether to speak: at the first, the last, and in between every few seconds."""
        now = time.monotonic()
        self._began.setdefault(name, (now, done))
        last = self._last.get(name)
        if last is not None and now - last < _SECONDS_BETWEEN_LINES and done != total:
            return False
        self._last[name] = now
        return True

    def _left(self, name: str, done: int, total: int) -> str:
        """Return the time that is left, where anything was done to estimate it by."""
        since, first = self._began[name]
        if done <= first or not total or done == total:
            return ""
        return f"  {duration((time.monotonic() - since) / (done - first) * (total - done))} left"


def size_of(done: int, total: int | None) -> str:
    """Return bytes done, and of how many, in the unit that shows them: "1.2 of 3.0 MB"."""
    largest = max(done, total or 0)
    units = (("GB", 1e9, 1), ("MB", 1e6, 1), ("kB", 1e3, 1), ("bytes", 1.0, 0))
    unit, scale, places = next((each for each in units if largest >= each[1]), units[-1])
    of = f" of {total / scale:.{places}f}" if total and total != done else ""
    return f"{done / scale:.{places}f}{of} {unit}"


def duration(seconds: float) -> str:
    """Return a time in the unit that shows it: "40 s", "4 min", "2.5 h", "3.1 days"."""
    if seconds < 99.5:
        return f"{max(1, round(seconds))} s"
    if seconds < 5_700:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 170_000 else f"{seconds / 86_400:.1f} days"


@contextlib.contextmanager
def display(console: Console, name: str) -> Iterator[Display]:
    """Show the progress of the work called `name`, as the console allows."""
    if not console.is_terminal:
        yield Lines(console, name)
        return
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console) as progress:
        yield Bars(progress, name)


def usual(name: str) -> AbstractContextManager[Display]:
    """Show progress to who calls from Python: bars on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    return display(console, name) if console.is_terminal else contextlib.nullcontext(Silent())
