"""ReLU attention."""

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.normalizers.base import Normalizer


class ReLU(Normalizer):
    """p_i = relu(x_i) / n, n the keys that the query sees: all may be zero.

    Wortsman et al. (2309.08586) divide by one number, the sequences' length: `length` sets it. With
    n, early queries, which see few keys, have the scale of late ones.
    """

    examples = ("relu", "relu(length=16)")
    fused = False

    def __init__(self, *, length: int = 0) -> None:
        super().__init__()
        if length < 0:
            raise WakefulError(
                f"relu: length must be a number of tokens, or 0 for those seen, got {length}"
            )
        self.length = length

    def weights(self, logits: Tensor) -> Tensor:
        if self.length:
            return logits.relu() / self.length
        return logits.relu() / (logits > -torch.inf).sum(-1, keepdim=True).clamp_min(1)
