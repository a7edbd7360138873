"""Depth mixes: what a block receives from the residual stream, one a file."""

from wakeful.depth.base import DepthMix
from wakeful.depth.denseformer import DenseFormer
from wakeful.depth.embedding_residual import EmbeddingResidual
from wakeful.depth.residual import Residual

__all__ = ["DenseFormer", "DepthMix", "EmbeddingResidual", "Residual"]
