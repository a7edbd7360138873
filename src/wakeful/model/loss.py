"""Cross-entropy of the head's logits."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

IGNORED = -100
"""The target that marks a position not to be counted."""


def cross_entropy(
    logits: Float[Tensor, "B L V"], targets: Int[Tensor, "B L"], *, reduction: str = "mean"
) -> Tensor:
    """Return −log softmax(logits)_target in nats: mean or sum over counted targets, or (B, L)."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    loss = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction
    )
    return loss.view_as(targets) if reduction == "none" else loss
