"""Normalizers: what turns attention logits into weights."""

from wakeful.normalizers.base import Normalizer, Softmax
from wakeful.normalizers.separate import ReLU, Sigmoid
from wakeful.normalizers.softcap import Softcap
from wakeful.normalizers.softmax1 import Softmax1
from wakeful.normalizers.softpick import Softpick

__all__ = [
    "Normalizer", "ReLU", "Sigmoid", "Softcap", "Softmax",
    "Softmax1", "Softpick",
]  # fmt: skip
