# Copyright 2026 the wakeful authors. SPDX-License-Identifier: Apache-2.0
"""RMSNorm with one scale for all channels, in one file.

From Attention to Activation, section 3: with a scale for each channel a few channels can stand out,
and with one they cannot. It takes the place of a model's RMSNorm, `RMSNormSingle(width)`.

Cite: Kaul et al. 2025, From Attention to Activation; wakeful, by its CITATION.cff.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNormSingle(nn.Module):
    """x / √(mean x² + ε) · γ over the last axis, γ one number that starts at 1."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized states (…, width), in the dtype of `x`."""
        return F.rms_norm(x, (self.width,), None, self.eps) * self.weight.to(x.dtype)
