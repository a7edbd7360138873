"""XSA: a head's output without what it says of its own token's value."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from wakeful.routes.base import Memory, ValueRoute
from wakeful.variants.shape import Shape


class XSA(ValueRoute):
    """u'_i = u_i − α (u_i · v̂_i) v̂_i with v̂_i = v_i / ‖v_i‖ (Exclusive Self Attention, 2603.09078).

    v_i is the value that the token itself offers to the head. The paper's α is 1, which is
    `learned=False`; otherwise α = tanh(a) with a learned a for each head, zero at the start.
    """

    examples = ("xsa", "xsa(learned=False)")
    neutral = "xsa"
    by_layer = True

    def __init__(self, *, learned: bool = True) -> None:
        super().__init__()
        self.learned = learned

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, layers)
        if self.learned:
            self.strengths = nn.Parameter(torch.zeros(len(self.layers), shape.num_heads))

    @torch.no_grad()
    def start_plain(self) -> str:
        """Set α to 0 if it is learned; return what the route still changes, "" if nothing."""
        if not self.learned:
            return super().start_plain()
        self.strengths.zero_()
        return ""

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        """Return u − α (u · v̂) v̂ of each head."""
        # Query heads that share a value head are taken together, so that no value is repeated.
        groups = v.shape[2]
        norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
        direction = (v / norm.clamp_min(torch.finfo(v.dtype).tiny)).unsqueeze(3)
        grouped = u.unflatten(2, (groups, -1))
        component = (grouped * direction).sum(-1, keepdim=True)  # u · v̂
        if self.learned:
            alpha = self.strengths[self.row_of[layer]].tanh().to(u.dtype)
            component = component * alpha.view(groups, -1, 1)
        return torch.addcmul(grouped, component, direction, value=-1).flatten(2, 3)
