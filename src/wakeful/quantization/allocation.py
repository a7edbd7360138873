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
    """A format for each group of layers."""

    choice_indices: tuple[int, ...]
    """For each group, the index of its format among the group's choices."""
    bytes: int
    cost: float
    bound: float
    """Lower bound on the cost of any allocation within the budget."""


class Frontier:
    """The cheapest allocation for every number of bytes."""

    def __init__(self, groups: Sequence[Sequence[FormatChoice]]) -> None:
        """Solve the knapsack for all budgets by dynamic programming over bytes.

        `groups` lists, for each group of layers, the bytes and cost of its possible formats, at
        least one. The tables have a column for each number of units of bytes that a budget allows
        beyond the smallest formats.
        """
        self.groups = groups
        smallest_bytes = [min(choice.bytes for choice in group) for group in groups]
        self.min_bytes = sum(smallest_bytes)
        self.max_bytes = sum(max(choice.bytes for choice in group) for group in groups)
        # The budget pays for the bytes of a group beyond its smallest choice.
        extra_bytes = [
            [choice.bytes - smallest for choice in group]
            for group, smallest in zip(groups, smallest_bytes, strict=True)
        ]
        unit = math.gcd(*(size for sizes in extra_bytes for size in sizes)) or 1  # 0: no choice
        total_extra = self.max_bytes - self.min_bytes
        if total_extra // unit > _UNITS:  # too many columns: a coarser unit
            unit = -(-total_extra // _UNITS)  # rounded up, as are the units of each choice
        self._unit = unit
        self._extra_units = [[-(-size // unit) for size in sizes] for sizes in extra_bytes]
        num_columns = sum(map(max, self._extra_units)) + 1
        # costs[c] is the least cost of the groups so far within c units; _choices[g, c] is the
        # index of group g's format in it.
        costs = np.zeros(num_columns)
        self._choices = np.zeros((len(groups), num_columns), dtype=np.int16)
        for group_index, choices in enumerate(groups):
            least_costs = np.full(num_columns, np.inf)
            for choice_index, choice in enumerate(choices):
                units = self._extra_units[group_index][choice_index]
                with_choice = np.full(num_columns, np.inf)
                with_choice[units:] = costs[: num_columns - units] + choice.cost
                better = with_choice < least_costs
                least_costs[better] = with_choice[better]
                self._choices[group_index, better] = choice_index
            costs = least_costs
        self._costs = costs

    def within_bytes(self, budget: int) -> Allocation:
        """Return the allocation of least cost that takes at most `budget` bytes.

        Raises:
            WakefulError: the smallest formats take more bytes than that.
        """
        if budget < self.min_bytes:
            raise WakefulError(
                f"{budget:,} bytes are too few: in their smallest formats the layers take "
                f"{self.min_bytes:,}"
            )
        last_column = len(self._costs) - 1  # within which all groups have their largest choices
        column = min((budget - self.min_bytes) // self._unit, last_column)
        return self._allocation_at(int(column), budget)

    def within_cost(self, cost: float) -> Allocation:
        """Return the smallest allocation whose cost is at most `cost`; if there is none, the
        allocation of least cost.
        """
        columns = np.flatnonzero(self._costs <= cost)
        column = int(columns[0]) if len(columns) else int(self._costs.argmin())
        return self._allocation_at(column, self.min_bytes + column * self._unit)

    def curve(self, points: int = 60) -> list[tuple[int, float]]:
        """Return (bytes, cost) of the best allocations for `points` evenly spaced budgets, in
        increasing order of bytes; an allocation that is best for several budgets comes once.
        """
        budgets = np.linspace(self.min_bytes, self.max_bytes, points).astype(int)
        allocations = [self.within_bytes(int(budget)) for budget in budgets]
        return sorted({(allocation.bytes, allocation.cost) for allocation in allocations})

    def _allocation_at(self, column: int, budget: int) -> Allocation:
        """Return the allocation of a column of the dynamic program, by tracing the best choice of
        each group back from it.

        A column stands for a number of units of bytes beyond the smallest choices; `budget` is the
        number of bytes for which the lower bound is computed.
        """
        choice_indices: list[int] = []
        for group_index in reversed(range(len(self.groups))):
            choice_index = int(self._choices[group_index, column])
            choice_indices.append(choice_index)
            units = self._extra_units[group_index][choice_index]
            column -= units  # what is left for earlier groups
        choice_indices.reverse()
        choices = [group[index] for group, index in zip(self.groups, choice_indices, strict=True)]
        return Allocation(
            tuple(choice_indices),
            sum(choice.bytes for choice in choices),
            sum(choice.cost for choice in choices),
            lower_bound(self.groups, budget),
        )


def lower_bound(groups: Sequence[Sequence[FormatChoice]], budget: int) -> float:
    """Return a lower bound on the cost of any allocation within `budget` bytes.

    It is the largest value of the Lagrangian dual that bisection finds,
    max over prices λ ≥ 0 of Σ_g min_f (cost_g(f) + λ bytes_g(f)) − λ · budget.
    """

    def dual(price: float) -> tuple[float, int]:
        """Return the dual's value at a price per byte, and the bytes of its minimizer."""

        def priced_cost(choice: FormatChoice) -> tuple[float, int]:
            return choice.cost + price * choice.bytes, choice.bytes

        cheapest = [min(group, key=priced_cost) for group in groups]
        total = sum(choice.bytes for choice in cheapest)
        return sum(choice.cost for choice in cheapest) + price * (total - budget), total

    # The dual is concave in the price; its slope is the number of bytes beyond the budget. So the
    # price is doubled, from a tiny one, until the cheapest choices fit the budget, and is then
    # bisected until float64 holds no price between.
    best, total = dual(0.0)
    low, high = 0.0, 1e-12
    while total > budget and high < 1e12:
        value, total = dual(high)
        best = max(best, value)
        low = high if total > budget else low
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        value, total = dual(middle)
        best = max(best, value)
        low, high = (middle, high) if total > budget else (low, middle)
    return best
