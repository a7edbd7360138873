"""The feed-forward half of a block."""

from typing import Literal, assert_never

import torch.nn.functional as F
from torch import Tensor, nn

MLPName = Literal["gelu", "swiglu"]


class GELU(nn.Module):
    """down(gelu(up(x))), the tanh form of GELU as in GPT-2."""

    def __init__(self, width: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), as in Llama (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def make_mlp(name: MLPName, width: int, hidden: int, *, bias: bool) -> nn.Module:
    """Return a feed-forward network from `width` through `hidden` channels and back."""
    match name:
        case "gelu":
            return GELU(width, hidden, bias=bias)
        case "swiglu":
            return SwiGLU(width, hidden, bias=bias)
    assert_never(name)
