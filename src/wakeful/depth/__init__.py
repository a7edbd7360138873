"""Depth mixes: what a block, or each half of it, receives from the residual stream."""

from wakeful.depth.attention_residuals import AttentionResiduals
from wakeful.depth.base import DepthMix, Residual, State, SublayerMix
from wakeful.depth.denseformer import DenseFormer
from wakeful.depth.hyper_connections import HyperConnections
from wakeful.depth.manifold import ManifoldHyperConnections
from wakeful.depth.mudd import MUDD

__all__ = [
    "MUDD", "AttentionResiduals", "DenseFormer", "DepthMix", "HyperConnections",
    "ManifoldHyperConnections", "Residual", "State", "SublayerMix",
]  # fmt: skip
