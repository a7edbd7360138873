"""Norms of the arena, whose channels are rescaled before they are normalized, or by a gate after
that, for `model.norm`, such as `wakeful_papers.norms:PreAffine`.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.norms import Norm, NormSpec, rms_norm
from wakeful.variants.roles import Role


class GatedNorm(Norm):
    """y ⊙ σ(W_up silu(W_down y)) with y = RMSNorm(x) ⊙ γ, W_down (r, D) and W_up (D, r).

    Qiu et al. 2026 (A Unified View of Attention and Residual Sinks, arXiv 2601.22966), r = `rank`:
    the gate rescales channels, so that no outlier has to do it through the norm. Both matrices
    start as the model's others do, so gates start near ½; they stay in full precision where linear
    layers are quantized.
    """

    examples = ("wakeful_papers.norms:GatedNorm", "wakeful_papers.norms:GatedNorm(rank=3)")
    scales_channels = True

    def __init__(self, *, rank: int = 16) -> None:
        super().__init__()
        if rank < 1:
            raise WakefulError(f"gated_norm: rank must be at least 1, got {rank}")
        self.rank = rank

    def attach(self, spec: NormSpec) -> None:
        """Create γ (`scale`), W_down and W_up."""
        super().attach(spec)
        # Not `weight`: what scales a norm's output changes the parameter of that name.
        self.scale = nn.Parameter(torch.ones(spec.width))
        self.down = nn.Parameter(torch.zeros(self.rank, spec.width))
        self.up = nn.Parameter(torch.zeros(spec.width, self.rank))

    def roles(self) -> Mapping[str, Role]:
        return {
            "down": Role(residual=1, decays=True, start="normal"),
            "up": Role(residual=0, decays=True, start="normal"),
        }

    def forward(self, x: Tensor) -> Tensor:
        y = rms_norm(x, self.scale, self.spec.eps)
        gate = F.linear(F.silu(F.linear(y, self.down.to(y.dtype))), self.up.to(y.dtype))
        return y * torch.sigmoid(gate)


class PreAffine(Norm):
    """RMSNorm(λ ⊙ x) ⊙ γ with one λ and one γ per channel, both 1 at the start.

    Qiu et al. 2026 (A Unified View of Attention and Residual Sinks, arXiv 2601.22966): the few
    channels that outgrow all others rescale the rest through the norm, and λ can do that instead.
    """

    examples = ("wakeful_papers.norms:PreAffine",)
    neutral = "wakeful_papers.norms:PreAffine"
    scales_channels = True

    def attach(self, spec: NormSpec) -> None:
        super().attach(spec)
        self.before = nn.Parameter(torch.ones(spec.width))
        self.weight = nn.Parameter(torch.ones(spec.width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x * self.before.to(x.dtype), self.weight, self.spec.eps)
