"""ReLU attention."""

import torch
from torch import Tensor

from wakeful.normalizers.base import Normalizer


class ReLU(Normalizer):
    """p_i = relu(x_i) / n, n the keys that the query sees (arXiv 2309.08586): all may be zero."""

    examples = ("relu",)
    fused = False

    def weights(self, logits: Tensor) -> Tensor:
        return logits.relu() / (logits > -torch.inf).sum(-1, keepdim=True).clamp_min(1)
