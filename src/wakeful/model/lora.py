"""Low-rank adapters: frozen matrices plus a trained difference of low rank.

y = W x + b + (α / r) B A x, A (r, in) random and B (out, r) zero at the start, so that the adapted
model starts as the same function (LoRA, 2106.09685, section 4.1; scaled as in peft).
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
"""Suffixes of an adapter's tensors, after the name of its layer."""


class LowRank(HasRoles, nn.Linear):
    """A linear layer with a frozen matrix and a trained low-rank difference.

    An existing layer is converted by setting its `__class__` and calling `adapt`.
    The scale is a buffer, so that a checkpoint holds all that merging needs.
    """

    default_role = Role()
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: Tensor

    def adapt(self, rank: int, alpha: float, seed: int) -> None:
        """Create the adapter's matrices and freeze all other parameters."""
        self.requires_grad_(False)
        weight = self.weight
        initial = torch.empty(rank, self.in_features)
        if not weight.is_meta:
            generator = torch.Generator(initial.device).manual_seed(seed)
            nn.init.kaiming_uniform_(initial, a=math.sqrt(5), generator=generator)
        self.lora_a = nn.Parameter(initial.to(weight))
        self.lora_b = nn.Parameter(weight.new_zeros(self.out_features, rank))
        self.register_buffer(SCALE[1:], weight.new_tensor(alpha / rank))

    def forward(self, input: Tensor) -> Tensor:  # the name in `nn.Linear`
        low = F.linear(F.linear(input, self.lora_a), self.lora_b)
        return super().forward(input) + self.lora_scale * low


class LowRankHeads(Heads, LowRank):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A projection into heads with a low-rank adapter."""


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Return W + (α / r) B A, summed in float64."""
    low = b.double() @ a.double()
    return (weight.double() + scale.double() * low).to(weight.dtype)


def adapt(
    decoder: Decoder, rank: int, *, alpha: float, modules: Modules = "all", seed: int = 0
) -> Decoder:
    """Add adapters to the linear layers of a decoder's blocks, in place, and freeze the rest.

    Parameters of value routes, depth mixes and normalizers stay trainable: one that was switched on
    in an existing model starts without effect and would keep none.

    `modules` are those of the attention, of the feed-forward network, or both. Each adapter is
    drawn from its own random stream, seeded by (seed, name of the layer).

    Raises:
        WakefulError: the rank or alpha is not positive.
    """
    if rank < 1 or not alpha > 0:
        raise WakefulError(
            f"train.lora.rank must be at least 1 and alpha positive, got {rank} and {alpha}"
        )
    trainable = [
        parameter
        for module in decoder.modules()
        if isinstance(module, ValueRoute | DepthMix | Normalizer)
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    decoder.requires_grad_(False)
    for parameter in trainable:
        parameter.requires_grad_(True)
    layers = [
        (name, module)
        for name, module in decoder.blocks.named_modules(prefix="blocks")
        if type(module) in (nn.Linear, Heads) and (modules == "all" or modules in name.split("."))
    ]
    for name, module in layers:
        low: Any = module
        low.__class__ = LowRankHeads if isinstance(module, Heads) else LowRank
        low.adapt(rank, alpha, seed_of(seed, name + A))
    return decoder
