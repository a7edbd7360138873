"""The plain residual stream."""

from wakeful.depth.base import DepthMix


class Residual(DepthMix):
    """x_n = X_n: the block's output, unchanged (the vanilla Transformer)."""

    examples = ("residual",)
    neutral = "residual"
