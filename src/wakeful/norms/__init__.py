"""Norms: what stands before or after a sublayer, one a file."""

from wakeful.norms.base import Norm, Place
from wakeful.norms.layernorm import LayerNorm
from wakeful.norms.rmsnorm import RMSNorm
from wakeful.norms.rmsnorm_single import RMSNormSingle

__all__ = ["LayerNorm", "Norm", "Place", "RMSNorm", "RMSNormSingle"]
