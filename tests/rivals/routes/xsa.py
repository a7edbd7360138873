"""XSA: what attention says of the token's own value is taken out."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.routes.base import Memory, ValueRoute
from wakeful.shape import Shape


class XSA(ValueRoute):
    """u − α (u·v̂) v̂ with v̂ = v_n / ‖v_n‖ and α = tanh(a) a head (arXiv 2603.09078)."""

    examples = ("xsa",)
    neutral = "xsa"

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, layers)
        self.repeats = shape.num_heads // shape.num_kv_heads
        self.strengths = nn.Parameter(torch.zeros(shape.num_layers, shape.num_heads, 1))

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        direction = F.normalize(v, dim=-1).repeat_interleave(self.repeats, dim=2)
        share = (u * direction).sum(-1, keepdim=True) * self.strengths[layer].tanh().to(u.dtype)
        return u - share * direction
