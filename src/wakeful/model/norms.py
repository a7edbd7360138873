"""Normalisations of the residual stream."""

from typing import Literal, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NormName = Literal["layernorm", "rmsnorm", "rmsnorm_single"]


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) · γ over the channels.

    γ has one entry a channel (RMSNorm-M), or is one scalar for all of them (RMSNorm-S,
    "RMSNormSingle" of From Attention to Activation, section 3), which no channel can use to stand
    out. Both start at 1.
    """

    def __init__(self, width: int, *, eps: float, single: bool = False) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.single = single
        self.weight = nn.Parameter(torch.ones(1 if single else width))

    def forward(self, x: Tensor) -> Tensor:
        if self.single:
            return F.rms_norm(x, (self.width,), None, self.eps) * self.weight.to(x.dtype)
        return F.rms_norm(x, (self.width,), self.weight.to(x.dtype), self.eps)


def make_norm(name: NormName, width: int, *, eps: float, bias: bool) -> nn.Module:
    """Return a normalisation over `width` channels; `bias` is LayerNorm's shift."""
    match name:
        case "layernorm":
            return nn.LayerNorm(width, eps=eps, bias=bias)
        case "rmsnorm":
            return RMSNorm(width, eps=eps)
        case "rmsnorm_single":
            return RMSNorm(width, eps=eps, single=True)
    assert_never(name)
