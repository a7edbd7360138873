"""Normalizers: what turns attention logits into weights."""

from wakeful.normalizers.base import Normalizer, Softmax
from wakeful.normalizers.bounded import ClippedSoftmax, Softcap
from wakeful.normalizers.query_sink import QuerySink
from wakeful.normalizers.separate import ReLU, Sigmoid
from wakeful.normalizers.softmax1 import Softmax1
from wakeful.normalizers.softpick import Softpick

__all__ = [
    "ClippedSoftmax", "Normalizer", "QuerySink", "ReLU", "Sigmoid", "Softcap", "Softmax",
    "Softmax1", "Softpick",
]  # fmt: skip
