"""Fixtures of the training tests."""

from train.runs import text

__all__ = ["text"]
