"""AttnRes: each sublayer reads a softmax over all earlier outputs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.depth import State, SublayerMix
from wakeful.shape import Shape


class AttentionOverDepth(SublayerMix):
    """h = Σ_j p_j f_j, p = softmax_j(w · RMSNorm(f_j) / √D), w = 0 at the start.

    After AttnRes (arXiv 2603.15031).
    f_0 is the embedding, f_j the output of sublayer j; the final norm reads such a sum as well.
    """

    name = "attention_over_depth"
    examples = ("attention_over_depth",)

    def attach(self, shape: Shape) -> None:
        super().attach(shape)
        self.queries = nn.Parameter(torch.zeros(2 * shape.num_layers, shape.width))

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def step(self, number: int, x: Tensor, out: Tensor, state: State) -> tuple[Tensor, State]:
        state = (*state, out)
        outputs = torch.stack(state)
        keys = F.rms_norm(outputs, outputs.shape[-1:], eps=1e-6)
        query = self.queries[number - 1].to(x.dtype) / x.shape[-1] ** 0.5
        shares = (keys @ query).softmax(0)
        return torch.einsum("jbl,jbld->bld", shares, outputs), state
