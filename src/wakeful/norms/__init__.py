"""Norms: what stands before or after a sublayer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from wakeful.errors import WakefulError
from wakeful.variants import Variant

__all__ = ["LayerNorm", "Norm", "Part", "Place", "RMSNorm", "RMSNormSingle", "rms_norm"]

Part = Literal["attention", "attention_output", "mlp", "mlp_output", "final", "query", "key"]
"""Before a layer's attention or feed-forward network (or over its sum with the stream, where the
placement says so), after one of them, before the head, or of the query or key heads."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a norm stands, and over how many channels."""

    part: Part
    layer: int
    """From 0; the final norm's is the number of layers."""
    num_layers: int
    width: int
    """Channels that it normalizes."""
    eps: float
    """Added to the variance."""
    bias: bool
    """Whether the model has biases."""


class Norm(Variant, nn.Module, ABC):
    """A normalization over the channels, one module a place."""

    place: Place
    centers: ClassVar[bool] = False
    """Whether it takes the mean over the channels out."""
    scales_channels: ClassVar[bool] = False
    """Whether channels have scales or biases of their own, which a rotation would mix."""

    def __init__(self) -> None:
        super().__init__()

    def attach(self, place: Place) -> None:
        """Make the parameters for one place."""
        self.place = place

    def take_scale(self) -> tuple[Tensor | None, Tensor | None]:
        """Take the channels' scales γ and biases β out of the norm, and return them.

        What is left commutes with rotations (of vectors without a mean, where it `centers`).

        Raises:
            WakefulError: it does more with channels than that.
        """
        raise WakefulError(f"model.norm = {self} has no scale that could be taken out of it")

    @abstractmethod
    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Return the normalized states, in the dtype they came in."""


def rms_norm(
    x: Float[Tensor, "*B D"], weight: Float[Tensor, "scales"], eps: float
) -> Float[Tensor, "*B D"]:
    """Return x / √(mean x² + ε) · γ over the channels; γ has one entry, or one a channel."""
    weight = weight.to(x.dtype)
    if x.device.type == "cpu":
        if torch.is_grad_enabled():
            return _RMSNorm.apply(x, weight, eps)
        return _normed(x, weight, eps)[0]
    if weight.shape[0] == 1:
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    return F.rms_norm(x, x.shape[-1:], weight, eps)


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


class RMSNorm(Norm):
    """x / √(mean x² + ε) · γ, γ a channel (RMSNorm-M of From Attention to Activation, section 3).

    γ starts at 1.
    """

    examples = ("rmsnorm",)
    neutral = "rmsnorm"
    scales_channels = True

    def attach(self, place: Place) -> None:
        super().attach(place)
        self.weight = nn.Parameter(torch.ones(place.width))

    @torch.no_grad()
    def take_scale(self) -> tuple[Tensor | None, Tensor | None]:
        scale = self.weight.detach().clone()
        self.weight.fill_(1.0)
        return scale, None

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.place.eps)


class RMSNormSingle(Norm):
    """x / √(mean x² + ε) · γ, γ one number for all channels (RMSNorm-S, "RMSNormSingle").

    No channel can use it to stand out (From Attention to Activation, section 3). γ starts at 1.
    """

    name = "rmsnorm_single"
    examples = ("rmsnorm_single",)

    def attach(self, place: Place) -> None:
        super().attach(place)
        self.weight = nn.Parameter(torch.ones(1))

    def take_scale(self) -> tuple[Tensor | None, Tensor | None]:
        return None, None  # one number commutes with everything

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.place.eps)


class LayerNorm(Norm):
    """(x − mean x) / √(var x + ε) · γ + β; β where the model has biases (Ba et al. 2016)."""

    examples = ("layernorm",)
    centers = True
    scales_channels = True

    def attach(self, place: Place) -> None:
        super().attach(place)
        self.weight = nn.Parameter(torch.ones(place.width))
        self.bias = nn.Parameter(torch.zeros(place.width)) if place.bias else None

    @torch.no_grad()
    def take_scale(self) -> tuple[Tensor | None, Tensor | None]:
        scale = self.weight.detach().clone()
        bias = None if self.bias is None else self.bias.detach().clone()
        self.weight.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()
        return scale, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.place.width,), self.weight, self.bias, self.place.eps)
