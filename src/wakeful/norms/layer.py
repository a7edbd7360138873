"""LayerNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.norms.base import Norm, NormSpec


class LayerNorm(Norm):
    """(x − mean x) / √(var x + ε) · γ + β; β where the model has biases (Ba et al. 2016)."""

    examples = ("layernorm",)
    centers = True
    scales_channels = True

    def attach(self, spec: NormSpec) -> None:
        super().attach(spec)
        self.weight = nn.Parameter(torch.ones(spec.width))
        self.bias = nn.Parameter(torch.zeros(spec.width)) if spec.bias else None

    @torch.no_grad()
    def take_scale_and_bias(self) -> tuple[Tensor | None, Tensor | None]:
        """Set γ to 1 and β to 0; return (γ, β) as they were, β None if there is none."""
        scale = self.weight.detach().clone()
        bias = None if self.bias is None else self.bias.detach().clone()
        self.weight.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()
        return scale, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.spec.width,), self.weight, self.bias, self.spec.eps)
