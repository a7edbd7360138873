"""Gated attention: a head's output passes a gate that the layer's input opens."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from wakeful.routes.base import Memory, ValueRoute
from wakeful.shape import Shape


class GatedAttention(ValueRoute):
    """U_n ⊙ σ(x W), a gate a head, half open at the start (arXiv 2505.06708)."""

    name = "gated_attention"
    examples = ("gated_attention",)

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, layers)
        self.gates = nn.ModuleDict(
            {str(n): nn.Linear(shape.width, shape.num_heads, bias=False) for n in self.layers}
        )
        for gate in self.gates.values():
            nn.init.zeros_(gate.weight)

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        return u * torch.sigmoid(self.gates[str(layer)](x)).unsqueeze(-1)
