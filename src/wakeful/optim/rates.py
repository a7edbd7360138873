"""The numbers that torch's optimizers do not all check: a learning rate and a weight decay."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from wakeful.errors import WakefulError

Rate = float | Tensor
"""A learning rate; as a tensor of one number, compiled steps see its changes."""


def check_rates(group: Mapping[str, Any]) -> None:
    """Check the learning rate and the weight decay of a group of parameters, if they are numbers.

    Raises:
        WakefulError: one of them is negative, infinite or NaN, or a tensor of several numbers.
    """
    for key in ("lr", "weight_decay"):
        value = group.get(key)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise WakefulError(f"Tensor {key} must be 1-element")  # torch's own words
        if isinstance(value, int | float | Tensor):
            number = float(value)
            if not (math.isfinite(number) and number >= 0):
                raise WakefulError(f"{key}={number} must be at least 0 and finite")
