"""Softpick."""

import torch
from torch import Tensor

from wakeful.normalizers import Normalizer


class Softpick(Normalizer):
    """p_i = relu(e^{x_i} − 1) / (Σ_j |e^{x_j} − 1| + ε) (arXiv 2504.20966)."""

    examples = ("softpick",)
    fused = False

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def weights(self, logits: Tensor) -> Tensor:
        seen = logits > -torch.inf
        top = logits.amax(-1, keepdim=True).clamp_min(0)  # all divided by e^top
        above = torch.exp(logits - top) - torch.exp(-top)
        return above.relu() / ((above.abs() * seen).sum(-1, keepdim=True) + self.eps)
