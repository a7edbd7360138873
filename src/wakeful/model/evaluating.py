"""A model switched to evaluation for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation, and back to what it was, after an error too."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
