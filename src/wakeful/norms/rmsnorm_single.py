"""RMSNorm with one scale."""

import torch
from torch import Tensor, nn

from wakeful.norms.base import Norm, Place, rms_norm


class RMSNormSingle(Norm):
    """x / √(mean x² + ε) · γ, γ one number for all channels (RMSNorm-S, "RMSNormSingle").

    No channel can use it to stand out (From Attention to Activation, section 3). γ starts at 1.
    """

    examples = ("rmsnorm_single",)

    def attach(self, place: Place) -> None:
        super().attach(place)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.place.eps)
