"""PreAffine: channels are scaled before they are normalized, too."""

import torch
from torch import Tensor, nn

from wakeful.norms.base import Norm, NormPlace
from wakeful.norms.rms import rms_norm


class PreAffine(Norm):
    """RMSNorm(λ ⊙ x) ⊙ γ with a λ and a γ a channel, both 1 at the start.

    Qiu et al. 2026 (A Unified View of Attention and Residual Sinks, arXiv 2601.22966): the few
    channels that outgrow all others rescale the rest through the norm, and λ can do that instead.
    """

    name = "pre_affine"
    examples = ("pre_affine",)
    neutral = "pre_affine"
    scales_channels = True

    def attach(self, place: NormPlace) -> None:
        super().attach(place)
        self.before = nn.Parameter(torch.ones(place.width))
        self.weight = nn.Parameter(torch.ones(place.width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x * self.before.to(x.dtype), self.weight, self.place.eps)
