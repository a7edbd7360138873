"""LayerNorm scaling: norms whose outputs shrink with depth."""

import math

import torch
from torch import Tensor

from wakeful.norms.base import Norm, NormSpec
from wakeful.norms.rms import RMSNorm, rms_norm


class LayerNormScaling(RMSNorm):
    """RMSNorm(x) / √n in layer n, counted from 1; the final norm is as it was.

    LayerNorm Scaling (Sun et al. 2025, The Curse of Depth, arXiv 2502.05795, eq. 4), which keeps
    the stream's variance from growing exponentially with depth. The authors scale both norms of a
    pre-norm Llama's layers (`NORM_TYPE=LNS` of their code); elsewhere it is every norm of a layer.
    They train without scaled initialization (`scale_residual_init`), which weakens it.
    1/√n is a constant: multiplied into γ it leaves a plain RMSNorm.
    """

    name = "layernorm_scaling"
    examples = ("layernorm_scaling",)
    neutral = None
    folded_name = "rmsnorm"

    def attach(self, spec: NormSpec) -> None:
        super().attach(spec)
        self.scale = 1.0 if spec.part == "final" else 1 / math.sqrt(spec.layer + 1)

    @torch.no_grad()
    def take_over(self, reference: Norm) -> None:
        """Change γ, copied from `reference`, by the ratio of the two layers' constants 1/√n."""
        assert isinstance(reference, LayerNormScaling)
        self.weight.mul_(reference.scale / self.scale)

    @torch.no_grad()
    def folded(self) -> dict[str, Tensor]:
        return {"weight": self.weight * self.scale}

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight * self.scale, self.spec.eps)
