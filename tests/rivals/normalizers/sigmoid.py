"""Sigmoid attention."""

import torch
from torch import Tensor

from wakeful.normalizers import Normalizer


class Sigmoid(Normalizer):
    """p_i = σ(x_i − ln n), n the keys that the query sees (arXiv 2409.04431)."""

    examples = ("sigmoid",)
    fused = False

    def weights(self, logits: Tensor) -> Tensor:
        seen = (logits > -torch.inf).sum(-1, keepdim=True).clamp_min(1)
        return torch.sigmoid(logits - seen.to(logits.dtype).log())
