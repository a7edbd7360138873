"""Fixtures of the training tests."""

from training.faults import stopped, uncut
from training.runs import text
from training.shares import folder

__all__ = ["folder", "stopped", "text", "uncut"]
