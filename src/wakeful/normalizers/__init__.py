"""Normalizers: how attention logits become weights, one a file."""

from wakeful.normalizers.base import Normalizer
from wakeful.normalizers.softmax import Softmax
from wakeful.normalizers.softmax1 import Softmax1

__all__ = ["Normalizer", "Softmax", "Softmax1"]
