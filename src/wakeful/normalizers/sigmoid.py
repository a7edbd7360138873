"""Sigmoid attention: every key is weighed by itself."""

import math

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.normalizers.base import Normalizer


class Sigmoid(Normalizer):
    """p_i = σ(x_i − ln n), n the keys that the query sees (Ramapuram et al., 2409.04431, sec. 4).

    The paper's n is one number, the length of its sequences: `length` sets it. A query that sees
    fewer keys then starts with less than the softmax's total weight of one.
    """

    examples = ("sigmoid", "sigmoid(length=16)")
    fused = False

    def __init__(self, *, length: int = 0) -> None:
        super().__init__()
        if length < 0:
            raise WakefulError(
                f"sigmoid: length must be a number of tokens, or 0 for those seen, got {length}"
            )
        self.length = length

    def weights(self, logits: Tensor) -> Tensor:
        if self.length:
            return torch.sigmoid(logits - math.log(self.length))
        seen = (logits > -torch.inf).sum(-1, keepdim=True).clamp_min(1)
        return torch.sigmoid(logits - seen.to(logits.dtype).log())
