"""Asynchronous training: batches read ahead, and losses read later.

To read a loss waits for all work before it.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from wakeful.data.order import Batches
from wakeful.runs.records import Step


def read_ahead(
    batches: Batches, steps: Iterable[int], device: torch.device
) -> Iterator[torch.Tensor]:
    """Yield the batches of `steps`; for a GPU each is read while the one before it is worked on,
    into memory that the copy need not wait for.
    """
    if device.type == "cpu":
        yield from map(batches.batch, steps)
        return

    def read(step: int) -> torch.Tensor:
        batch = batches.batch(step)
        return batch.pin_memory() if device.type == "cuda" else batch

    with ThreadPoolExecutor(1) as pool:
        coming = deque[Future[torch.Tensor]]()
        for step in steps:
            coming.append(pool.submit(read, step))
            if len(coming) > 1:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


class _Taken(NamedTuple):
    step: int
    lr: float
    tokens: int
    loss: Tensor
    norm: Tensor
    best: float | None


class Fault(NamedTuple):
    """A step, counted from 1, and what of it is not finite."""

    step: int
    what: str


class Unread:
    """The steps since the last reading, and how long they take together."""

    def __init__(self, tokens: int, seconds: float, fastest: float | None = None) -> None:
        """Begin after `tokens` and `seconds` of training.

        `fastest` is the tokens a second that the devices' peak would allow, where it is known.
        """
        self.fastest = fastest
        self.tokens = tokens
        self.seconds = seconds
        self._before = tokens
        self._taken: list[_Taken] = []
        self._values: list[tuple[float, float]] = []
        self._began = 0.0

    def begin(self) -> None:
        """Start the clock, where it stands still."""
        if not self._taken:
            self._began = time.perf_counter()

    def add(
        self, step: int, lr: float, tokens: int, loss: Tensor, norm: Tensor, best: float | None
    ) -> None:
        """Note step `step`, counted from 1, of `tokens` tokens; `best` is a task's own loss."""
        self.tokens += tokens
        self._taken.append(_Taken(step, lr, self.tokens, loss, norm, best))

    def read(self) -> Fault | None:
        """Wait for the device; return the first step with a figure that is not finite.

        That step and those after it are forgotten.
        """
        taken, self._values = self._taken, []
        if not taken:
            return None
        pairs = torch.stack([torch.stack((s.loss, s.norm.to(s.loss.dtype))) for s in taken])
        for number, (loss, norm) in enumerate(pairs.tolist()):
            for name, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value):
                    self._taken = taken[:number]
                    return Fault(taken[number].step, f"the {name} is {value}")
            self._values.append((loss, norm))
        return None

    def rows(self) -> list[Step]:
        """Stop the clock; return the rows of the steps that were read: each has its share of it."""
        elapsed = time.perf_counter() - self._began
        taken, self._taken = self._taken, []
        rows = []
        before, share = self._before, elapsed / max(1, len(taken))
        for each, (loss, norm) in zip(taken, self._values, strict=True):
            self.seconds += share
            speed = (each.tokens - before) / share
            rows.append(
                Step(
                    step=each.step,
                    loss=loss,
                    lr=each.lr,
                    grad_norm=norm,
                    tokens=each.tokens,
                    seconds=round(self.seconds, 4),
                    tokens_per_second=round(speed, 1),
                    mfu=None if self.fastest is None else round(speed / self.fastest, 4),
                    excess_loss=None if each.best is None else loss - each.best,
                )
            )
            before = each.tokens
        self._before = self.tokens
        return rows
