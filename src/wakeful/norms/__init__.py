"""Norms: what stands before or after a sublayer."""

from wakeful.norms.base import Norm, NormSite, NormSpec
from wakeful.norms.layer import LayerNorm
from wakeful.norms.rms import RMSNorm, RMSNormSingle, rms_norm
from wakeful.norms.scaling import LayerNormScaling

__all__ = [
    "LayerNorm", "LayerNormScaling", "Norm", "NormSite", "NormSpec", "RMSNorm", "RMSNormSingle",
    "rms_norm",
]  # fmt: skip
