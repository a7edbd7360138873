"""Optimizers whose training and evaluation weights differ, such as schedule-free ones.

Such an optimizer (Defazio et al. 2024, 2405.15682) has methods `train` and `eval` that switch the
parameters between the two.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def switches(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimizer has separate evaluation weights."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def switch(optimizer: Any, *, train: bool) -> None:
    """Switch the parameters to the training or the evaluation weights, if they differ."""
    if switches(optimizer):
        (optimizer.train if train else optimizer.eval)()


@contextlib.contextmanager
def evaluation_weights(optimizer: torch.optim.Optimizer) -> Iterator[list[Tensor]]:
    """Switch the parameters to the evaluation weights inside the context; yield copies of the
    training weights, in the parameters' order, or [] if the two do not differ.

    Switching there and back rounds, so the copies are restored at the end.
    """
    if not switches(optimizer):
        yield []
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [p.detach().clone() for p in parameters]
    switch(optimizer, train=False)
    try:
        yield trained
    finally:
        switch(optimizer, train=True)
        restore_weights(optimizer, trained)


@torch.no_grad()
def restore_weights(optimizer: torch.optim.Optimizer, trained: list[Tensor]) -> None:
    """Set the parameters to the training weights that `evaluation_weights` yielded."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Not strict: `trained` is empty where the weights do not differ.
    for parameter, weight in zip(parameters, trained, strict=False):
        parameter.copy_(weight)
