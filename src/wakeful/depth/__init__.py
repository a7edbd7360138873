"""Depth mixes: what a block, or each half of it, receives from the residual stream."""

from wakeful.depth.attention_residuals import OASIS, AttentionResiduals
from wakeful.depth.base import DepthMix, Residual, State, SublayerMix
from wakeful.depth.denseformer import DenseFormer
from wakeful.depth.embedding_residual import EmbeddingResidual, X0Lambdas
from wakeful.depth.hyper_connections import HyperConnections
from wakeful.depth.manifold import ManifoldHyperConnections
from wakeful.depth.mudd import MUDD
from wakeful.depth.residual_gate import ResidualGate

__all__ = [
    "MUDD", "OASIS", "AttentionResiduals", "DenseFormer", "DepthMix", "EmbeddingResidual",
    "HyperConnections", "ManifoldHyperConnections", "Residual", "ResidualGate", "State",
    "SublayerMix", "X0Lambdas",
]  # fmt: skip
