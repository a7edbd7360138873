"""The choice of a format for each group of layers: the least cost within a number of bytes.

A multiple-choice knapsack: minimize Σ_g cost_g(f_g) subject to Σ_g bytes_g(f_g) ≤ B. Dynamic
programming over bytes solves it for every B at once, exactly where bytes are few multiples of one
unit; otherwise bytes are rounded up to units. The Lagrangian dual, max over λ ≥ 0 of
Σ_g min_f (cost_g(f) + λ bytes_g(f)) − λ B, bounds what any choice can reach.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wakeful.errors import WakefulError

_UNITS = 2**16
"""Bytes are counted in at most this many units."""


@dataclass(frozen=True)
class FormatChoice:
    """Bytes and cost of one group of layers in a format."""

    bytes: int
    cost: float


@dataclass(frozen=True)
class Allocation:
    """A chosen format for each group."""

    chosen: tuple[int, ...]
    """The number of the format of each group, among its choices."""
    bytes: int
    cost: float
    bound: float
    """No choice within the budget costs less."""


class Frontier:
    """The best allocation within every number of bytes."""

    def __init__(self, groups: Sequence[Sequence[FormatChoice]]) -> None:
        """Solve for all budgets; each group has at least one choice."""
        self.groups = groups
        self.least = sum(min(choice.bytes for choice in group) for group in groups)
        self.most = sum(max(choice.bytes for choice in group) for group in groups)
        # Only what a group takes beyond its smallest choice is to be divided.
        extra = [
            [choice.bytes - min(alternative.bytes for alternative in group) for choice in group]
            for group in groups
        ]
        unit = math.gcd(*(value for values in extra for value in values)) or 1
        room = self.most - self.least
        if room // unit > _UNITS:
            unit = -(-room // _UNITS)
        self._unit = unit
        self._extra = [[-(-value // unit) for value in values] for values in extra]
        width = sum(map(max, self._extra)) + 1
        costs = np.zeros(width)
        self._chosen = np.zeros((len(groups), width), dtype=np.int16)
        for group, choices in enumerate(groups):
            best = np.full(width, np.inf)
            for number, choice in enumerate(choices):
                shift = self._extra[group][number]
                reached = np.full(width, np.inf)
                reached[shift:] = costs[: width - shift] + choice.cost
                better = reached < best
                best[better] = reached[better]
                self._chosen[group, better] = number
            costs = best
        self._costs = costs

    def within_bytes(self, budget: int) -> Allocation:
        """Return the allocation that costs least within a number of bytes.

        Raises:
            WakefulError: the smallest choices take more.
        """
        if budget < self.least:
            raise WakefulError(
                f"{budget:,} bytes are too few: in their smallest formats the layers take "
                f"{self.least:,}"
            )
        column = min((budget - self.least) // self._unit, len(self._costs) - 1)
        return self._at(int(column), budget)

    def within_cost(self, cost: float) -> Allocation:
        """Return the allocation that takes the fewest bytes at no more than this cost, or the one
        that costs least where none does.
        """
        enough = np.flatnonzero(self._costs <= cost)
        column = int(enough[0]) if len(enough) else int(self._costs.argmin())
        return self._at(column, self.least + column * self._unit)

    def curve(self, points: int = 60) -> list[tuple[int, float]]:
        """Return bytes and cost of allocations along the frontier, the smallest first."""
        budgets = np.linspace(self.least, self.most, points).astype(int)
        allocations = [self.within_bytes(int(budget)) for budget in budgets]
        return sorted({(allocation.bytes, allocation.cost) for allocation in allocations})

    def _at(self, column: int, budget: int) -> Allocation:
        chosen: list[int] = []
        for group in reversed(range(len(self.groups))):
            number = int(self._chosen[group, column])
            chosen.append(number)
            column -= self._extra[group][number]
        chosen.reverse()
        picked = [group[number] for group, number in zip(self.groups, chosen, strict=True)]
        return Allocation(
            tuple(chosen),
            sum(choice.bytes for choice in picked),
            sum(choice.cost for choice in picked),
            lower_bound(self.groups, budget),
        )


def lower_bound(groups: Sequence[Sequence[FormatChoice]], budget: int) -> float:
    """Return the largest value of the Lagrangian dual: no allocation within `budget` costs less."""

    def dual(price: float) -> tuple[float, int]:
        def key(choice: FormatChoice) -> tuple[float, int]:
            return choice.cost + price * choice.bytes, choice.bytes

        cheapest = [min(group, key=key) for group in groups]
        total = sum(choice.bytes for choice in cheapest)
        return sum(choice.cost for choice in cheapest) + price * (total - budget), total

    # The dual is concave in the price of a byte; its slope is the bytes beyond the budget.
    best, total = dual(0.0)
    low, high = 0.0, 1e-12
    while total > budget and high < 1e12:
        value, total = dual(high)
        best, low, high = max(best, value), (high if total > budget else low), 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        value, total = dual(middle)
        best = max(best, value)
        low, high = (middle, high) if total > budget else (low, middle)
    return best
