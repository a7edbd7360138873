"""How long work on data tells how far it is."""

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]
"""Called with a stage ("reading", "tokenizer", "encoding", "comparing"), bytes of text done, and of
how many."""

BATCH_BYTES = 2**20  # of text between two writes and two calls of `progress`


def no_progress(_stage: str, _done: int, _total: int | None) -> None:
    """Tell nobody."""


class Steps:
    """Calls `progress` once every BATCH_BYTES, and at the end."""

    def __init__(self, stage: str, total: int | None, progress: Progress) -> None:
        self._stage, self._total, self._progress = stage, total, progress
        self._next = 0

    def reach(self, done: int) -> None:
        if done >= self._next:
            self._progress(self._stage, done, self._total)
            self._next = done + BATCH_BYTES

    def finish(self, done: int) -> None:
        self._progress(self._stage, done, done)
