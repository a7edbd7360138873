"""Softpick: a rectified softmax."""

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.normalizers.base import Normalizer


class Softpick(Normalizer):
    """p_i = relu(e^{x_i} − 1) / (Σ_j |e^{x_j} − 1| + ε) (Zuhri et al., 2504.20966, eq. 2).

    Keys with x ≤ 0 get no weight, and a query whose logits are all below zero attends to no key.
    As in the authors' code every term is divided by e^m before ε is added to the sum. Here m is
    max(x, 0): the authors' max x overflows where all logits are far below zero.

    Near x = 0 the weights are relu(x_i) / (Σ_j |x_j| + ε), whose slope grows to 1 / ε: in half
    precision the gradients of a model whose logits are small carry large errors.
    """

    # A large ε, as tests compare gradients of small logits in bfloat16.
    examples = ("softpick(eps=4.0)",)
    fused = False

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        if eps <= 0:
            raise WakefulError(f"softpick: eps must be positive, got {eps:g}")
        self.eps = eps

    def weights(self, logits: Tensor) -> Tensor:
        """Return relu(e^{x_i} − 1) / (Σ_j |e^{x_j} − 1| + ε), but with every term divided by e^m,
        m = max(0, max x), against overflow.
        """
        m = logits.amax(-1, keepdim=True).clamp_min(0)
        terms = torch.exp(logits - m) - torch.exp(-m)  # (e^x − 1) / e^m
        # A masked logit's term is −e^{−m}, and must not count.
        total = terms.abs().masked_fill(logits == -torch.inf, 0).sum(-1, keepdim=True)
        return terms.relu() / (total + self.eps)
