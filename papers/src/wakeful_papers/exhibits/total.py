"""The total cost of several exhibits, with runs that they share counted once."""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from wakeful.config.schema import DataConfig
from wakeful_papers.exhibits.plan import FolderCost, Plan, RunCost, Stage
from wakeful_papers.exhibits.size import tokens_of

NUM_CARDS = 8
"""Cards over which `TotalCost.busiest_card` distributes runs."""


@dataclass(frozen=True)
class TotalCost(RunCost):
    """The cost of several exhibits together, very roughly."""

    memory: int
    """Bytes of the largest run."""
    busiest_card: float
    """Operations of the busiest of `NUM_CARDS` cards, if each run takes one card and the longest
    runs start first; heirs begin when all rows have ended."""


def total_cost(plans: Iterable[Plan], done: Callable[[str], bool] = lambda _: False) -> TotalCost:
    """Return the cost of several exhibits, without the runs that are `done`.

    The texts' tokens take disk space as well as the checkpoints.
    """
    by_folder: dict[str, FolderCost] = {}
    texts: dict[DataConfig, float] = {}
    memory = 0
    for plan in plans:
        by_folder |= {name: cost for name, cost in plan.costs_by_folder.items() if not done(name)}
        memory = max(memory, plan.memory)
        for job in plan.jobs:
            data = job.config.data
            texts[data] = max(texts.get(data, 0.0), 4.0 * tokens_of(job.config))
    costs = by_folder.values()
    return TotalCost(
        runs=sum(cost.runs for cost in costs),
        tokens=sum(cost.tokens for cost in costs),
        operations=sum(cost.operations for cost in costs),
        disk=sum(cost.disk for cost in costs) + sum(texts.values()),
        memory=memory,
        busiest_card=_busiest_card(costs),
    )


def _busiest_card(costs: Iterable[FolderCost]) -> float:
    """Return the operations of the busiest card if `NUM_CARDS` cards share the runs.

    The longest remaining run goes to the card that is free first (Graham 1969's LPT rule, at most
    4/3 of the best packing). Heirs begin when the rows have ended; models are read on one card.
    """
    stages: dict[Stage, list[float]] = {"rows": [], "heirs": [], "reading": []}
    for cost in costs:
        stages[cost.stage].append(cost.operations)
    total = sum(stages.pop("reading"))
    for operations in stages.values():
        loads = [0.0] * NUM_CARDS
        for count in sorted(operations, reverse=True):
            heapq.heapreplace(loads, loads[0] + count)
        total += max(loads)
    return total
