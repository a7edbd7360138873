"""Optimizers that train other weights than those they are judged by, as schedule-free ones do.

Such an optimizer (Defazio et al. 2024, 2405.15682) has methods `train` and `eval` that move the
weights from the ones to the others and back.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def switches(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has weights to be judged by."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def switch(optimizer: Any, *, train: bool) -> None:
    """Let the parameters be the weights to train, or those to be judged by, if they differ."""
    if switches(optimizer):
        (optimizer.train if train else optimizer.eval)()


@contextlib.contextmanager
def judged(optimizer: torch.optim.Optimizer) -> Iterator[list[Tensor]]:
    """Let the parameters be those to be judged by; yield copies of those to train, if they differ.

    The way there and back rounds, so that it is copies that come back, to the bit.
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
        put_back(optimizer, trained)


@torch.no_grad()
def put_back(optimizer: torch.optim.Optimizer, trained: list[Tensor]) -> None:
    """Give parameters the weights to train that `judged` yielded."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, weight in zip(parameters, trained, strict=False):
        parameter.copy_(weight)
