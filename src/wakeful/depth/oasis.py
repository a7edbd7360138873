"""OASIS: attention residuals that may read nothing, least of all of attention to nothing."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.depth.attention_residuals import AttentionResiduals, weighted
from wakeful.depth.base import State
from wakeful.shape import Shape

_START = -5.0
"""A coupling of 0.007."""
_MOST = 10.0


class OASIS(AttentionResiduals):
    """h_s = Σ_j p_j v_j, p = softmax-1 of g_j = w_s · RMSNorm(v_j) − c_s (ψ_j − ψ̄).

    Attention Sinks and Outliers in Attention Residuals (Luo et al. 2026, arXiv 2605.17887,
    sections 4.2 and 4.3, and github.com/robinzixuan/OASIS): softmax-1 over depth, and less of the
    layers whose attention gives much to no key. ψ_j is that share, a token's mean over the heads
    (`SublayerMix.noticed`), in both halves of a layer, 0 of the embedding, and ψ̄ its mean over j.
    c = softplus(b) up to 10, b = −5 at the start, a number for each reader. The authors' tokens
    attend by softmax-1 too: set `model.normalizer = "softmax1"`, without which ψ is what softmax-1
    would leave.
    """

    name = "oasis"
    examples = ("oasis",)

    reads_nulls = True

    def __init__(self) -> None:
        super().__init__()

    def attach(self, shape: Shape) -> None:
        super().attach(shape)
        self.couplings = nn.ParameterDict(
            {reader: nn.Parameter(torch.tensor(_START)) for reader in self.queries}
        )

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x.new_zeros(*x.shape[:-1], 1), x)

    def noticed(self, null: Tensor, state: State) -> State:
        nulls, *outputs = state
        null = null.unsqueeze(-1)
        return torch.cat([nulls, null, null], -1), *outputs

    def step(self, number: int, x: Tensor, out: Tensor, state: State) -> tuple[Tensor, State]:
        nulls, *outputs = *state, out
        nothing = nulls[..., : len(outputs)]
        beyond = (nothing - nothing.mean(-1, keepdim=True)).movedim(-1, 0).to(x.dtype)
        coupling = F.softplus(self.couplings[str(number + 1)].to(x.dtype)).clamp(max=_MOST)
        logits = self.logits(number + 1, outputs) - coupling * beyond
        # Softmax-1: a logit of 0 whose share is of nothing.
        shares = F.pad(logits, (0, 0, 0, 0, 1, 0)).softmax(0)[1:]
        return weighted(shares, outputs), (nulls, *outputs)
