"""V-scale: small values are made smaller, and so are the gradients that gather at them."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.routes.base import QKV, Memory, ValueRoute
from wakeful.variants.shape import Shape

_NEARLY_PLAIN = -8.0
"""A θ at which C is 0.0003 of what it is at θ = 0."""


class ValueScale(ValueRoute):
    """v̂ = r / (r + C) v with r = ‖v‖² and C = D d σ² e^θ, θ = 0 at the start.

    V-scale of Attention Sinks Induce Gradient Sinks (Chen et al. 2026, arXiv 2603.17771, section
    5): θ is one number a layer and value head, D the stream's width, d the head's and σ, `std`, the
    deviation of initial weights, so that C is what r is expected to be at the start. A sink's
    value, which is small, passes r / C of its gradient on; a large value stays as it is.
    """

    name = "value_scale"
    examples = ("value_scale",)
    neutral = "value_scale(std=0.0)"
    mixes = frozenset({"value"})
    by_layer = True

    def __init__(self, *, std: float = 0.02) -> None:
        super().__init__()
        if std < 0:
            raise WakefulError(f"value_scale: std must not be negative, got {std:g}")
        self.std = std

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        """Create θ = 0 for each layer and value head."""
        super().attach(shape, layers)
        heads = shape.num_kv_heads
        self.exponents = nn.ParameterDict(
            {str(layer): nn.Parameter(torch.zeros(heads)) for layer in self.layers}
        )

    @torch.no_grad()
    def start_plain(self) -> str:
        """Set θ so that C, and so the change, is small but not 0; return a sentence on that."""
        if not self.std:  # C is 0, and nothing changes
            return ""
        for exponents in self.exponents.values():
            exponents.fill_(_NEARLY_PLAIN)
        factor = math.exp(_NEARLY_PLAIN)  # C = 0 would be plain, but then θ has no gradient
        return f"{self} starts with C of {factor:.4f} of their size, for zero cannot learn"

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        """Scale each value by r / (r + C), r its squared norm."""
        r = torch.linalg.vecdot(qkv.v, qkv.v).unsqueeze(-1)
        start = self.shape.width * self.shape.head_width * self.std**2
        c = (start * self.exponents[str(layer)].exp()).to(r.dtype).unsqueeze(-1)
        total = (r + c).clamp_min(torch.finfo(r.dtype).tiny)
        return qkv._replace(v=r / total * qkv.v)
