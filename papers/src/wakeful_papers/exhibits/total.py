"""What several exhibits take together, runs that they share counted once."""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from wakeful.config.schema import DataConfig
from wakeful_papers.exhibits.plan import Piece, Plan, RunCost, Stage
from wakeful_papers.exhibits.size import tokens_of

CARDS = 8
"""Those over which `Total.on_eight` deals out runs."""


@dataclass(frozen=True)
class Total(RunCost):
    """What exhibits take together, very roughly."""

    memory: int
    """Bytes of the largest run."""
    on_eight: float
    """Operations of the busiest card at best: `CARDS` cards share the runs, each run on one card
    and the longest first, and heirs begin when all rows have ended."""


def total_of(plans: Iterable[Plan], done: Callable[[str], bool] = lambda _: False) -> Total:
    """Return what exhibits take together: what they share once, without the runs that are `done`.

    Their texts' tokens lie on the disk beside the checkpoints.
    """
    left: dict[str, Piece] = {}
    texts: dict[DataConfig, float] = {}
    memory = 0
    for plan in plans:
        left |= {name: piece for name, piece in plan.pieces.items() if not done(name)}
        memory = max(memory, plan.memory)
        for job in plan.jobs:
            data = job.config.data
            texts[data] = max(texts.get(data, 0.0), 4.0 * tokens_of(job.config))
    pieces = left.values()
    return Total(
        runs=sum(piece.runs for piece in pieces),
        tokens=sum(piece.tokens for piece in pieces),
        operations=sum(piece.operations for piece in pieces),
        disk=sum(piece.disk for piece in pieces) + sum(texts.values()),
        memory=memory,
        on_eight=_busiest(pieces),
    )


def _busiest(pieces: Iterable[Piece]) -> float:
    """Return the operations of the busiest card where `CARDS` share runs.

    The longest run left goes to the card that is free first (Graham 1969's LPT rule, at most 4/3 of
    the best packing). Heirs begin when the rows have ended; models are read on one card.
    """
    stages: dict[Stage, list[float]] = {"rows": [], "heirs": [], "reading": []}
    for piece in pieces:
        stages[piece.stage].append(piece.operations)
    whole = sum(stages.pop("reading"))
    for costs in stages.values():
        loads = [0.0] * CARDS
        for cost in sorted(costs, reverse=True):
            heapq.heapreplace(loads, loads[0] + cost)
        whole += max(loads)
    return whole
