"""Softmax of capped logits."""

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.normalizers.base import Normalizer
from wakeful.parts.softmax1 import sink_softmax


class Softcap(Normalizer):
    """p = softmax(c tanh(x / c)), c = `cap` (Gemma 2, arXiv 2408.00118, section 2)."""

    examples = ("softcap", "softcap(cap=2.0)")
    fused = False

    def __init__(self, *, cap: float = 50.0) -> None:
        super().__init__()
        if not cap > 0:
            raise WakefulError(f"softcap: cap must be positive, got {cap:g}")
        self.cap = cap

    def weights(self, logits: Tensor) -> Tensor:
        """Return the softmax of the capped logits; masked logits, −∞, get no weight."""
        # The cap would lift the −∞ of masked logits to −c: they are masked again.
        capped = self.cap * torch.tanh(logits / self.cap)
        return sink_softmax(capped.masked_fill(logits == -torch.inf, -torch.inf), None)
