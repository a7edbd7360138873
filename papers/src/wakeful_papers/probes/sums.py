"""`SumProbe`: probes whose rows are quotients of sums."""

from typing import Any

import torch
from torch import Tensor

from wakeful.probes.base import Probe


class SumProbe(Probe):
    """A probe whose rows follow from sums over sequences."""

    def __init__(self) -> None:
        self.sums: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        """For each key (such as layer and head): a total, and its count, which broadcasts against
        it. Their quotient is the mean."""

    def add(self, key: tuple[Any, ...], total: Tensor, count: Tensor | float = 1.0) -> None:
        """Add to the running total and count of `key`, in float64 on the CPU."""
        previous_total, previous_count = self.sums.get(key, (0.0, 0.0))
        total, count = (
            torch.as_tensor(number, dtype=torch.float64).cpu() for number in (total, count)
        )
        self.sums[key] = total + previous_total, count + previous_count
