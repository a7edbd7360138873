"""The hidden-state residual: half of what each block receives is the embedding."""

from collections.abc import Mapping

import torch
from torch import Tensor

from wakeful.depth.base import DepthMix


class EmbeddingResidual(DepthMix):
    """x_n = (1 − w) X_n + w X_0, w = ½: the hidden-state residual (reported worse than none).

    The counterpart of ResFormer's eq. 7 for hidden states H_0. It is applied before every block
    but the first, and not after the last, whose output goes to the head.
    """

    name = "embedding_residual"
    examples = ("embedding_residual",)
    neutral = "embedding_residual(weight=0.0)"

    def __init__(self, *, weight: float = 0.5) -> None:
        super().__init__()
        self.weight = weight

    def reads(self, number: int) -> frozenset[int]:
        return frozenset({0}) if number < self.num_layers else frozenset()

    def forward(self, number: int, x: Tensor, hiddens: Mapping[int, Tensor]) -> Tensor:
        return torch.lerp(x, hiddens[0], self.weight) if number < self.num_layers else x
