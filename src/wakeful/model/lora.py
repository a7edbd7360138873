"""Low-rank adapters: matrices stand still and learn a difference of small rank.

y = W x + b + (α / r) B A x, A (r, in) drawn at random and B (out, r) zero at the start, so that a
model begins as it was (LoRA, 2106.09685, section 4.1; the difference is scaled as peft scales it).
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.depth.base import DepthMix
from wakeful.errors import WakefulError
from wakeful.model.attention import Heads
from wakeful.model.decoder import Decoder
from wakeful.model.initialize import seed_of
from wakeful.normalizers.base import Normalizer
from wakeful.routes.base import ValueRoute
from wakeful.variants.roles import HasRoles, Role

Modules = Literal["all", "attention", "mlp"]
A, B, SCALE = ".lora_a", ".lora_b", ".lora_scale"
"""How the names of an adapter's tensors end, after the name of its layer."""


class LowRank(HasRoles, nn.Linear):
    """A linear layer whose matrix stands still beside a difference that learns.

    One that exists becomes this by its class, and then by `adapt`.
    The scale is a buffer, so that a checkpoint says all that merging takes.
    """

    others = Role()
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: Tensor

    def adapt(self, rank: int, alpha: float, seed: int) -> None:
        """Begin an adapter; everything else stands still from now on."""
        self.requires_grad_(False)
        weight = self.weight
        drawn = torch.empty(rank, self.in_features)
        if not weight.is_meta:
            generator = torch.Generator(drawn.device).manual_seed(seed)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        self.lora_a = nn.Parameter(drawn.to(weight))
        self.lora_b = nn.Parameter(weight.new_zeros(self.out_features, rank))
        self.register_buffer(SCALE[1:], weight.new_tensor(alpha / rank))

    def forward(self, input: Tensor) -> Tensor:  # torch's name for it
        low = F.linear(F.linear(input, self.lora_a), self.lora_b)
        return super().forward(input) + self.lora_scale * low


class LowRankHeads(Heads, LowRank):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A projection into heads that learns a difference."""


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Return W + (α / r) B A, summed in float64."""
    low = b.double() @ a.double()
    return (weight.double() + scale.double() * low).to(weight.dtype)


def adapt(
    decoder: Decoder, rank: int, *, alpha: float, modules: Modules = "all", seed: int = 0
) -> Decoder:
    """Give the linear layers of a decoder's blocks adapters, in place, and let their matrices rest.

    Of the rest, what a value route, a depth mix and a normalizer learn goes on learning: a model
    that one of them was switched on in begins as if it were off, and would stay so.

    `modules` are those of the attention, of the feed-forward network, or both. Each adapter draws
    from a stream of its own, named by its layer and the seed.

    Raises:
        WakefulError: the rank or alpha is not positive.
    """
    if rank < 1 or not alpha > 0:
        raise WakefulError(
            f"train.lora.rank must be at least 1 and alpha positive, got {rank} and {alpha}"
        )
    learns = [
        parameter
        for module in decoder.modules()
        if isinstance(module, ValueRoute | DepthMix | Normalizer)
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    decoder.requires_grad_(False)
    for parameter in learns:
        parameter.requires_grad_(True)
    found = [
        (name, module)
        for name, module in decoder.blocks.named_modules(prefix="blocks")
        if type(module) in (nn.Linear, Heads) and (modules == "all" or modules in name.split("."))
    ]
    for name, module in found:
        low: Any = module
        low.__class__ = LowRankHeads if isinstance(module, Heads) else LowRank
        low.adapt(rank, alpha, seed_of(seed, name + A))
    return decoder
