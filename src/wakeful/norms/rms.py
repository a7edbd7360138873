"""RMSNorm: with a scale a channel, and with one for all of them."""

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from wakeful.norms.base import Norm, NormSpec
from wakeful.tracing import differentiate, is_differentiated_again, is_transformed


def rms_norm(
    x: Float[Tensor, "*B D"], weight: Float[Tensor, "scales"], eps: float
) -> Float[Tensor, "*B D"]:
    """Return x / √(mean x² + ε) · γ over the channels; γ has one entry, or one for each channel."""
    weight = weight.to(x.dtype)
    # torch has no fused kernel on the CPU: ours runs there, unless `torch.func` is to transform it.
    if x.device.type == "cpu" and not is_transformed():
        if torch.is_grad_enabled():
            return _RMSNorm.apply(x, weight, eps)
        normed, _ = _normalize(x, weight, eps)
        return normed
    return _rms_norm_by_torch(x, weight, eps)


def _rms_norm_by_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `rms_norm` by torch's own function, which takes no weight of one entry."""
    if weight.shape[0] == 1:
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    return F.rms_norm(x, x.shape[-1:], weight, eps)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm on the CPU, where torch has no fused kernel: half the passes over memory."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return x / √(mean x² + ε) · γ, and save what backward needs."""
        out, inverse_rms = _normalize(x, weight, eps)
        ctx.save_for_backward(x, inverse_rms, weight)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return (dx, dγ, None for ε), given `grad`, which is dy.

        With r = 1/√(mean x² + ε), n = x r and ḡ = dy · γ, dx is r (ḡ − n · mean(ḡ n)) and dγ is
        Σ dy · n. If the gradient itself is to be differentiated, torch's own norm computes it.
        """
        x, inverse_rms, weight = ctx.saved_tensors
        if is_differentiated_again():
            definition = partial(_rms_norm_by_torch, eps=ctx.eps)
            return *differentiate(definition, (x, weight), grad), None
        n = x * inverse_rms
        # If γ has one entry for all channels, `sum_to_size` adds up the channels.
        grad_weight = (grad * n).flatten(0, -2).sum(0).sum_to_size(weight.shape)
        g = grad * weight  # ḡ
        minus_mean = torch.linalg.vecdot(g, n).div_(-x.shape[-1]).unsqueeze(-1)
        return g.addcmul_(n, minus_mean).mul_(inverse_rms), grad_weight, None


def _normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (the normalized states times γ, 1 / √(mean x² + ε)), each in the dtype of `x`; the
    mean is computed in float32 or wider.
    """
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    sum_of_squares = torch.linalg.vecdot(wide, wide)
    inverse_rms = sum_of_squares.div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1).to(x.dtype)
    return (x * inverse_rms).mul_(weight), inverse_rms


class RMSNorm(Norm):
    """x / √(mean x² + ε) · γ, one γ for each channel (RMSNorm-M of From Attention to Activation,
    section 3).

    γ starts at 1.
    """

    examples = ("rmsnorm",)
    neutral = "rmsnorm"
    scales_channels = True

    def attach(self, spec: NormSpec) -> None:
        super().attach(spec)
        self.weight = nn.Parameter(torch.ones(spec.width))

    @torch.no_grad()
    def take_scale_and_bias(self) -> tuple[Tensor | None, Tensor | None]:
        """Set γ to 1; return (γ as it was, None, as there is no bias)."""
        scale = self.weight.detach().clone()
        self.weight.fill_(1.0)
        return scale, None

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.spec.eps)


class RMSNormSingle(Norm):
    """x / √(mean x² + ε) · γ, γ one number for all channels (RMSNorm-S, "RMSNormSingle").

    No channel can use it to stand out (From Attention to Activation, section 3). γ starts at 1.
    """

    name = "rmsnorm_single"
    examples = ("rmsnorm_single",)
    folded_name = "rmsnorm"

    def attach(self, spec: NormSpec) -> None:
        super().attach(spec)
        self.weight = nn.Parameter(torch.ones(1))

    def take_scale_and_bias(self) -> tuple[Tensor | None, Tensor | None]:
        return None, None  # one number commutes with everything

    @torch.no_grad()
    def folded(self) -> dict[str, Tensor]:
        return {"weight": self.weight.repeat(self.spec.width)}

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.spec.eps)
