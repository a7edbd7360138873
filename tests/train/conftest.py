"""Fixtures of the training tests."""

from train.faults import stopped, uncut
from train.runs import text

__all__ = ["stopped", "text", "uncut"]
