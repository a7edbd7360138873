"""The feed-forward half of a block."""

from collections.abc import Mapping
from typing import assert_never

import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.config.model import MLPName
from wakeful.roles import BIAS, READS, WRITES, HasRoles, Role


class MLP(HasRoles, nn.Module):
    """Linear layers into hidden channels, and `down` back from them."""

    def roles(self) -> Mapping[str, Role]:
        into = dict.fromkeys(("gate.weight", "up.weight"), READS)
        biases = dict.fromkeys(("gate.bias", "up.bias", "down.bias"), BIAS)
        return {"down.weight": WRITES, **into, **biases}


class GELU(MLP):
    """down(gelu(up(x))): GELU by its tanh form as in GPT-2, or by the error function (`exact`)."""

    def __init__(self, width: int, hidden: int, *, bias: bool, exact: bool = False) -> None:
        super().__init__()
        self.approximate = "none" if exact else "tanh"
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class SwiGLU(MLP):
    """down(silu(gate(x)) · up(x)), as in Llama (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def make_mlp(name: MLPName, width: int, hidden: int, *, bias: bool) -> MLP:
    """Return a feed-forward network from `width` through `hidden` channels and back."""
    match name:
        case "gelu":
            return GELU(width, hidden, bias=bias)
        case "gelu_exact":
            return GELU(width, hidden, bias=bias, exact=True)
        case "swiglu":
            return SwiGLU(width, hidden, bias=bias)
    assert_never(name)
