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
    """Yield the batch of each of `steps`, in order, in main memory.

    For a GPU, a thread reads each batch during the step before it. For CUDA the memory is pinned,
    so that copying to the device does not wait.
    """
    if device.type == "cpu":  # reading ahead would take the cores that compute the step
        yield from map(batches.batch, steps)
        return

    def read(step: int) -> torch.Tensor:
        batch = batches.batch(step)
        return batch.pin_memory() if device.type == "cuda" else batch

    with ThreadPoolExecutor(1) as pool:
        futures = deque[Future[torch.Tensor]]()
        for step in steps:
            futures.append(pool.submit(read, step))
            if len(futures) > 1:  # the next batch is being read: yield the one before it
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()


class _PendingStep(NamedTuple):
    step: int
    lr: float
    tokens: int
    """Tokens trained on up to this step, its own included."""
    loss: Tensor
    norm: Tensor
    optimal_loss: float | None


class Fault(NamedTuple):
    """A step, counted from 1, and its figure that is not finite, in words."""

    step: int
    message: str


class PendingSteps:
    """Steps whose losses are still on the device, and the time they take together."""

    def __init__(self, tokens: int, seconds: float) -> None:
        """Begin after `tokens` and `seconds` of training."""
        self.tokens = tokens
        self.seconds = seconds
        self._tokens_in_rows = tokens
        """Tokens trained on up to the last step that `rows` has returned."""
        self._steps: list[_PendingStep] = []
        self._losses_and_norms: list[tuple[float, float]] = []
        """Figures of the steps that `read` has read, until `rows` returns these."""
        self._start_time = 0.0

    def begin(self) -> None:
        """Start the clock unless it runs."""
        if not self._steps:
            self._start_time = time.perf_counter()

    def add(
        self,
        step: int,
        lr: float,
        tokens: int,
        loss: Tensor,
        norm: Tensor,
        optimal_loss: float | None,
    ) -> None:
        """Add a step of `tokens` tokens; `step` is its number, counted from 1.

        `loss` and `norm`, of the gradient, stay on the device until `read`. `optimal_loss` is the
        loss of a synthetic task's own distribution, None for text.
        """
        self.tokens += tokens
        self._steps.append(_PendingStep(step, lr, self.tokens, loss, norm, optimal_loss))

    def read(self) -> Fault | None:
        """Wait for the device and read the steps' losses and gradient norms, for `rows` to return.

        At the first figure that is not finite, drop its step and those after it, and return the
        fault; otherwise return None.
        """
        steps, self._losses_and_norms = self._steps, []
        if not steps:
            return None
        # One tensor of all steps: copying it from the device waits once.
        pairs = torch.stack([torch.stack((s.loss, s.norm.to(s.loss.dtype))) for s in steps])
        for index, (loss, norm) in enumerate(pairs.tolist()):
            for name, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value):
                    self._steps = steps[:index]
                    return Fault(steps[index].step, f"the {name} is {value}")
            self._losses_and_norms.append((loss, norm))
        return None

    def rows(self) -> list[StepRow]:
        """Stop the clock; return the steps that `read` has just read as rows of metrics.jsonl, and
        forget them.

        The time since `begin` is divided evenly among them.
        """
        elapsed = time.perf_counter() - self._start_time
        steps, self._steps = self._steps, []
        rows = []
        tokens_before = self._tokens_in_rows
        seconds_per_step = elapsed / max(1, len(steps))
        for pending, (loss, norm) in zip(steps, self._losses_and_norms, strict=True):
            self.seconds += seconds_per_step
            speed = (pending.tokens - tokens_before) / seconds_per_step
            excess = None if pending.optimal_loss is None else loss - pending.optimal_loss
            rows.append(
                StepRow(
                    step=pending.step,
                    loss=loss,
                    lr=pending.lr,
                    grad_norm=norm,
                    tokens=pending.tokens,
                    seconds=round(self.seconds, 4),
                    tokens_per_second=round(speed, 1),
                    excess_loss=excess,
                )
            )
            tokens_before = pending.tokens
        self._tokens_in_rows = self.tokens
        return rows
