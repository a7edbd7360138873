"""Clipped softmax."""

import torch
from torch import Tensor, nn

from wakeful.normalizers import Normalizer
from wakeful.parts.softmax1 import sink_softmax
from wakeful.variants.shape import Shape


class Clipped(Normalizer):
    """p = clip((η − γ) softmax + γ, 0, 1), γ < 0 learned a head here (arXiv 2306.12929)."""

    examples = ("clipped",)
    fused = False

    def __init__(self, *, eta: float = 1.03, gamma: float = -0.03) -> None:
        super().__init__()
        self.eta, self.gamma = eta, gamma

    def attach(self, shape: Shape) -> None:
        super().attach(shape)
        self.floors = nn.Parameter(torch.full((shape.num_heads, 1, 1), self.gamma))

    def weights(self, logits: Tensor) -> Tensor:
        floors = -self.floors.to(logits.dtype).abs()
        softmax = sink_softmax(logits, None)
        stretched = ((self.eta - floors) * softmax + floors).clamp(0, 1)
        return torch.where(logits > -torch.inf, stretched, 0)
