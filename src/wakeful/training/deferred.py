"""Asynchronous training: batches are read ahead, and losses later.

Reading a loss waits for all of the device's earlier work.
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
from wakeful.runs.records import StepRow


def prefetch(
    batches: Batches, steps: Iterable[int], device: torch.device
) -> Iterator[torch.Tensor]:
    """Yield the batches of `steps`; a GPU's are read during the step before, into pinned memory."""
    if device.type == "cpu":
        yield from map(batches.batch, steps)
        return

    def read(step: int) -> torch.Tensor:
        batch = batches.batch(step)
        return batch.pin_memory() if device.type == "cuda" else batch

    with ThreadPoolExecutor(1) as pool:
        futures = deque[Future[torch.Tensor]]()
        for step in steps:
            futures.append(pool.submit(read, step))
            if len(futures) > 1:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()


class _PendingStep(NamedTuple):
    step: int
    lr: float
    tokens: int
    loss: Tensor
    norm: Tensor
    best: float | None


class Fault(NamedTuple):
    """A step, counted from 1, and its figure that is not finite, in words."""

    step: int
    message: str


class PendingSteps:
    """Steps whose losses are still on the device, and the time they take together."""

    def __init__(self, tokens: int, seconds: float, fastest: float | None = None) -> None:
        """Begin after `tokens` and `seconds` of training.

        `fastest` is the tokens per second at the devices' peak, where it is known.
        """
        self.fastest = fastest
        self.tokens = tokens
        self.seconds = seconds
        self._before = tokens
        self._steps: list[_PendingStep] = []
        self._values: list[tuple[float, float]] = []
        self._began = 0.0

    def begin(self) -> None:
        """Start the clock unless it runs."""
        if not self._steps:
            self._began = time.perf_counter()

    def add(
        self, step: int, lr: float, tokens: int, loss: Tensor, norm: Tensor, best: float | None
    ) -> None:
        """Add step `step`, counted from 1, of `tokens` tokens; `best` is a task's own loss."""
        self.tokens += tokens
        self._steps.append(_PendingStep(step, lr, self.tokens, loss, norm, best))

    def read(self) -> Fault | None:
        """Wait for the device and read the steps' losses and gradient norms.

        Return the first step with a figure that is not finite, or None; it and the steps after it
        are dropped.
        """
        steps, self._values = self._steps, []
        if not steps:
            return None
        pairs = torch.stack([torch.stack((s.loss, s.norm.to(s.loss.dtype))) for s in steps])
        for number, (loss, norm) in enumerate(pairs.tolist()):
            for name, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value):
                    self._steps = steps[:number]
                    return Fault(steps[number].step, f"the {name} is {value}")
            self._values.append((loss, norm))
        return None

    def rows(self) -> list[StepRow]:
        """Stop the clock; return a row for each step read, with its share of the time."""
        elapsed = time.perf_counter() - self._began
        steps, self._steps = self._steps, []
        rows = []
        tokens_before, share = self._before, elapsed / max(1, len(steps))
        for pending, (loss, norm) in zip(steps, self._values, strict=True):
            self.seconds += share
            speed = (pending.tokens - tokens_before) / share
            rows.append(
                StepRow(
                    step=pending.step,
                    loss=loss,
                    lr=pending.lr,
                    grad_norm=norm,
                    tokens=pending.tokens,
                    seconds=round(self.seconds, 4),
                    tokens_per_second=round(speed, 1),
                    mfu=None if self.fastest is None else round(speed / self.fastest, 4),
                    excess_loss=None if pending.best is None else loss - pending.best,
                )
            )
            tokens_before = pending.tokens
        self._before = self.tokens
        return rows
