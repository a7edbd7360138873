"""Ratios of times, measured in one process by taking turns."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ratio:
    """How long one thing takes against another: median over rounds, and the quartiles."""

    name: str
    peer: str
    ratio: float
    low: float
    high: float
    seconds: float
    peer_seconds: float
    target: str = ""


def compare(
    name: str,
    run: Callable[[], object],
    peer: str,
    run_peer: Callable[[], object],
    *,
    rounds: int = 15,
    warmup: int = 2,
    target: str = "",
) -> Ratio:
    """Time two callables in turns and return the ratio of the first to the second.

    Each round times both, in an order that alternates, so that a machine that slows down or speeds
    up slows both; the ratio is the median of the rounds' ratios.
    """
    for _ in range(warmup):
        run()
        run_peer()
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        if number % 2:
            second = seconds(run_peer)
            first = seconds(run)
        else:
            first = seconds(run)
            second = seconds(run_peer)
        pairs.append((first, second))
    ratios = [first / second for first, second in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    return Ratio(
        name=name,
        peer=peer,
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        seconds=statistics.median(first for first, _ in pairs),
        peer_seconds=statistics.median(second for _, second in pairs),
        target=target,
    )


def seconds(run: Callable[[], object]) -> float:
    """Return how long a call takes, a GPU's work included."""
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    """Wait until a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
