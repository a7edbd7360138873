"""Depth mixes: what a block, or each half of it, receives from the residual stream."""

from wakeful.depth.base import DepthMix, Residual, State, SublayerMix
from wakeful.depth.denseformer import DenseFormer
from wakeful.depth.hyper_connections import HyperConnections
from wakeful.depth.mudd import MUDD

__all__ = [
    "MUDD", "DenseFormer", "DepthMix", "HyperConnections", "Residual", "State", "SublayerMix",
]  # fmt: skip
