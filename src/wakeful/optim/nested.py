"""The step of an optimizer that another one is made of."""

from collections.abc import Callable
from typing import Any

import torch


def take_nested_step(
    optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None
) -> Any:
    """Take a step without torch's hooks, which the optimizer around it has called already."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # by torch, when the optimizer was made
        step = step.__wrapped__
    return step(optimizer, closure)
