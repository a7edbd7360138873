"""Progress on the terminal: bars where there is one, a line now and then where there is none."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_SECONDS_BETWEEN_LINES = 10.0


class Display(ABC):
    """What the loop tells while it works."""

    @abstractmethod
    def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None:
        """Report a finished training step."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Say one line."""

    @abstractmethod
    def stage(self, name: str, done: int, total: int | None) -> None:
        """Report work other than training, such as preparing data."""


class Silent(Display):
    """Says nothing."""

    def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None: ...

    def note(self, text: str) -> None: ...

    def stage(self, name: str, done: int, total: int | None) -> None: ...


class Bars(Display):
    """A rich progress bar with loss, tokens a second and time left."""

    def __init__(self, console: Console, progress: Progress, name: str) -> None:
        self._console, self._progress, self._name = console, progress, name
        self._tasks: dict[str, TaskID] = {}

    def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None:
        text = f"loss {loss:6.3f}  {tokens_per_second:8,.0f} tokens/s"
        task = self._task(self._name, total)
        self._progress.update(task, completed=done, figures=text)

    def note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def stage(self, name: str, done: int, total: int | None) -> None:
        text = f"{done / 1e6:.1f} MB"
        self._progress.update(self._task(name, total), completed=done, total=total, figures=text)

    def _task(self, name: str, total: int | None) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, figures="")
        return self._tasks[name]


class Lines(Display):
    """One line every few seconds, for logs."""

    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name = console, name
        self._last = 0.0
        self._began: tuple[float, int] | None = None

    def step(self, done: int, total: int, loss: float, tokens_per_second: float) -> None:
        now = time.monotonic()
        self._began = self._began or (now, done)
        if now - self._last >= _SECONDS_BETWEEN_LINES or done == total:
            since, first = self._began
            left = (now - since) / max(1, done - first) * (total - done)
            self._last = now
            self.note(
                f"{self._name}: step {done}/{total}  loss {loss:.3f}  "
                f"{tokens_per_second:,.0f} tokens/s  {left:.0f} s left"
            )

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stage(self, name: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES or done == total:
            self._last = now
            of = f" of {total / 1e6:.1f}" if total else ""
            self.note(f"{name}: {done / 1e6:.1f}{of} MB")


@contextlib.contextmanager
def display(console: Console, name: str) -> Iterator[Display]:
    """Show the progress of the work called `name`, as the console allows."""
    if not console.is_terminal:
        yield Lines(console, name)
        return
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console) as progress:
        yield Bars(console, progress, name)
