"""What a model computes, held to numbers."""

import torch
from torch import Tensor

from wakeful.errors import Diverged


def widened(x: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 where it is."""
    return x if x.dtype == torch.float64 else x.float()


def check_finite(*outputs: Tensor) -> None:
    """Raise `Diverged` where something that a model computed is NaN or infinite."""
    if not all(torch.isfinite(each).all() for each in outputs):
        raise Diverged(
            "the model's outputs are not finite: it is damaged, or needs dtype float32 or float64"
        )


def check_logits(logits: Tensor) -> Tensor:
    """Return logits; raise `Diverged` where a token (the last axis) is infinitely likely or NaN."""
    check_finite(logits.amax(-1))
    return logits
