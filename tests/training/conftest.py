"""Fixtures of the training tests."""

from train.faults import stopped, uncut
from train.runs import text
from train.shares import folder

__all__ = ["folder", "stopped", "text", "uncut"]
