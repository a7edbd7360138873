"""Checks that a model's outputs are finite."""

import torch
from torch import Tensor

from wakeful.errors import Diverged


def widened(x: Tensor) -> Tensor:
    """Return a tensor in float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def check_finite(*outputs: Tensor) -> None:
    """Raise `Diverged` if an output of a model has NaN or infinite entries."""
    if not all(torch.isfinite(output).all() for output in outputs):
        raise Diverged(
            "the model's outputs are not finite: it is damaged, or needs dtype float32 or float64"
        )


def check_logits(logits: Tensor) -> Tensor:
    """Return the logits, unchanged; raise `Diverged` if a row's largest logit is infinite or NaN.

    Other logits may be −∞, for tokens that are ruled out. A NaN anywhere is the row's largest.
    """
    check_finite(logits.amax(-1))
    return logits
