"""ReLU and sigmoid attention: each key's weight depends on its own logit only."""

import math

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.normalizers.base import Normalizer


class _Separate(Normalizer):
    """Base class of weights scaled by n, the number of keys that the query sees, or by `length`."""

    fused = False

    def __init__(self, *, length: int = 0) -> None:
        """Store the number of keys by which weights are scaled: `length`, or, if that is 0, the
        number that each query sees.

        Raises:
            WakefulError: `length` is negative.
        """
        super().__init__()
        if length < 0:
            raise WakefulError(
                f"{type(self).__name__.lower()}: length must be a number of tokens, or 0 for those "
                f"seen, got {length}"
            )
        self.length = length


class ReLU(_Separate):
    """p_i = relu(x_i) / n, n the number of keys that the query sees; all weights may be zero.

    Wortsman et al. (2309.08586) divide by one number, the sequences' length: `length` sets it. With
    n, early queries, which see few keys, have the scale of late ones.
    """

    examples = ("relu", "relu(length=16)")

    def weights(self, logits: Tensor) -> Tensor:
        return logits.relu() / (self.length or _count_keys(logits))


class Sigmoid(_Separate):
    """p_i = σ(x_i − ln n), n keys that the query sees (Ramapuram et al., 2409.04431, section 4).

    The paper's n is one number, the length of its sequences: `length` sets it. A query that sees
    fewer keys then starts with less than the softmax's total weight of one.
    """

    examples = ("sigmoid", "sigmoid(length=16)")

    def weights(self, logits: Tensor) -> Tensor:
        """Return σ(x − ln n), n = `length`, or else the number of keys that each query sees."""
        if self.length:
            return torch.sigmoid(logits - math.log(self.length))
        return torch.sigmoid(logits - _count_keys(logits).to(logits.dtype).log())


def _count_keys(logits: Tensor) -> Tensor:
    """Return how many keys each query sees, at least 1, from logits that are −∞ where masked."""
    return (logits > -torch.inf).sum(-1, keepdim=True).clamp_min(1)
