"""RMSNorm with a scale a channel."""

import torch
from torch import Tensor, nn

from wakeful.norms.base import Norm, Place, rms_norm


class RMSNorm(Norm):
    """x / √(mean x² + ε) · γ, γ a channel (RMSNorm-M of From Attention to Activation, section 3).

    γ starts at 1.
    """

    examples = ("rmsnorm",)
    neutral = "rmsnorm"

    def attach(self, place: Place) -> None:
        super().attach(place)
        self.weight = nn.Parameter(torch.ones(place.width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.place.eps)
