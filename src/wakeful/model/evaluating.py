"""Models switched to evaluation for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Switch models to evaluation, and each of their modules back to what it was, after an error
    too.
    """
    training = [part for model in models for part in model.modules() if part.training]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
