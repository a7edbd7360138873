"""LayerNorm scaling: deeper norms are smaller."""

import math

from torch import Tensor

from wakeful.norms import Place, RMSNorm


class ScaledByLayer(RMSNorm):
    """RMSNorm(x) / √n in layer n, from 1; the final norm is as it was (arXiv 2502.05795)."""

    name = "scaled_by_layer"
    examples = ("scaled_by_layer",)
    neutral = None

    def attach(self, place: Place) -> None:
        super().attach(place)
        self.scale = 1.0 if place.part == "final" else 1 / math.sqrt(place.layer + 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale
