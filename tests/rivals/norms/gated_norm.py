"""GatedNorm and PreAffine."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.norms import Norm, Place, rms_norm


class GatedNorm(Norm):
    """y ⊙ σ(W_up silu(W_down y)) with y = RMSNorm(λ ⊙ x) γ (arXiv 2601.22966)."""

    name = "gated_norm"
    examples = ("gated_norm", "gated_norm(rank=3)")

    def __init__(self, *, rank: int = 2) -> None:
        super().__init__()
        self.rank = rank

    def attach(self, place: Place) -> None:
        super().attach(place)
        self.before = nn.Parameter(torch.ones(place.width))
        self.weight = nn.Parameter(torch.ones(place.width))
        self.down = nn.Linear(place.width, self.rank, bias=False)
        self.up = nn.Linear(self.rank, place.width, bias=False)
        nn.init.constant_(self.down.weight, 1 / place.width)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = rms_norm(x * self.before.to(x.dtype), self.weight, self.place.eps)
        return y * torch.sigmoid(self.up(F.silu(self.down(y))))
