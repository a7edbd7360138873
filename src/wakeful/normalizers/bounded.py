"""Softmax within bounds: of its weights, which reach zero and one, or of its logits."""

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.normalizers.base import Normalizer
from wakeful.parts.softmax1 import sink_softmax


class ClippedSoftmax(Normalizer):
    """p = clip((η − γ) softmax(x) + γ, 0, 1) (Bondarenko et al., 2306.12929, eq. 4).

    A weight of the softmax up to −γ / (η − γ) becomes zero, one from (1 − γ) / (η − γ) on becomes
    one, and no gradient flows through either. η is the paper's ζ. It found γ = −α / T with α from 2
    to 4 and η = 1 to serve sequences of T tokens: γ = −0.03 is α = 4 at T = 128.
    """

    name = "clipped_softmax"
    examples = ("clipped_softmax", "clipped_softmax(eta=1.03)")
    neutral = "clipped_softmax(gamma=0.0)"
    fused = False

    def __init__(self, *, gamma: float = -0.03, eta: float = 1.0) -> None:
        super().__init__()
        if gamma > 0 or eta < 1:
            raise WakefulError(
                "clipped_softmax: gamma must be at most 0 and eta at least 1, got "
                f"gamma={gamma:g}, eta={eta:g}"
            )
        self.gamma = gamma
        self.eta = eta

    def weights(self, logits: Tensor) -> Tensor:
        stretched = (self.eta - self.gamma) * sink_softmax(logits, None) + self.gamma
        return stretched.clamp(0, 1)


class Softcap(Normalizer):
    """p = softmax(c tanh(x / c)), c = `cap` (Gemma 2, arXiv 2408.00118, section 2)."""

    examples = ("softcap", "softcap(cap=2.0)")
    fused = False

    def __init__(self, *, cap: float = 50.0) -> None:
        super().__init__()
        if not cap > 0:
            raise WakefulError(f"softcap: cap must be positive, got {cap:g}")
        self.cap = cap

    def weights(self, logits: Tensor) -> Tensor:
        # The cap would lift the −∞ of masked logits to −c: they are masked again.
        capped = self.cap * torch.tanh(logits / self.cap)
        return sink_softmax(capped.masked_fill(logits == -torch.inf, -torch.inf), None)
