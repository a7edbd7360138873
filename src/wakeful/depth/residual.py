"""The plain residual stream."""

from collections.abc import Mapping

from torch import Tensor

from wakeful.depth.base import DepthMix


class Residual(DepthMix):
    """x_n = X_n: the block's output, unchanged (the vanilla Transformer)."""

    examples = ("residual",)
    neutral = "residual"

    def forward(self, number: int, x: Tensor, hiddens: Mapping[int, Tensor]) -> Tensor:
        return x
