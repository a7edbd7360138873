"""Normalisations of the residual stream."""

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from wakeful.config.model import NormName


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
        weight = self.weight.to(x.dtype)
        if x.device.type == "cpu":
            if torch.is_grad_enabled():
                return _RMSNorm.apply(x, weight, self.eps)
            return _normed(x, weight, self.eps)[0]
        if self.single:
            return F.rms_norm(x, (self.width,), None, self.eps) * weight
        return F.rms_norm(x, (self.width,), weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm on the CPU, where torch has no fused kernel: half the passes over memory.

    With r = 1/√(mean x² + ε), n = x r and ḡ = dy · γ: dx = r (ḡ − n · mean(ḡ n)), dγ = Σ dy · n.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out, inverse = _normed(x, weight, eps)
        ctx.save_for_backward(x, inverse, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, inverse, weight = ctx.saved_tensors
        normed = x * inverse
        grad_weight = (grad * normed).flatten(0, -2).sum(0).sum_to_size(weight.shape)
        scaled = grad * weight
        inner = torch.linalg.vecdot(scaled, normed).div_(-x.shape[-1]).unsqueeze(-1)
        return scaled.addcmul_(normed, inner).mul_(inverse), grad_weight, None


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    exact = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    square = torch.linalg.vecdot(exact, exact)
    inverse = square.div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1).to(x.dtype)
    return (x * inverse).mul_(weight), inverse


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
