"""One layer of the decoder: its attention, its feed-forward network, and where its norms stand."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import assert_never

import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.config.model import MLPName
from wakeful.depth.base import State, SublayerMix
from wakeful.model.attention import Attention, Flow
from wakeful.model.turned import WalshHadamard
from wakeful.norms.base import Norm, NormSite
from wakeful.placements import NormOrder
from wakeful.roles import BIAS, READS, WRITES, HasRoles, Role
from wakeful.routes.base import Read


class MLP(HasRoles, nn.Module):
    """Linear layers into hidden channels, and `down` back from them.

    `turn` acts on the hidden channels before `down`, where there is one.
    """

    down: nn.Linear

    def __init__(self, *, turned: bool = False) -> None:
        super().__init__()
        self.turn = WalshHadamard() if turned else None

    def roles(self) -> Mapping[str, Role]:
        into = dict.fromkeys(("gate.weight", "up.weight"), READS)
        biases = dict.fromkeys(("gate.bias", "up.bias", "down.bias"), BIAS)
        return {"down.weight": WRITES, **into, **biases}


class GELU(MLP):
    """down(gelu(up(x))): GELU by its tanh form as in GPT-2, or by the error function (`exact`)."""

    def __init__(
        self, width: int, hidden: int, *, bias: bool, exact: bool = False, turned: bool = False
    ) -> None:
        super().__init__(turned=turned)
        self.approximate = "none" if exact else "tanh"
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x), approximate=self.approximate)
        return self.down(hidden if self.turn is None else self.turn(hidden))


class SwiGLU(MLP):
    """down(silu(gate(x)) · up(x)), as in Llama (Shazeer 2020).

    GeGLU is the same with GELU's tanh form in the place of silu (`gelu`), as in Gemma.
    """

    def __init__(
        self, width: int, hidden: int, *, bias: bool, gelu: bool = False, turned: bool = False
    ) -> None:
        super().__init__(turned=turned)
        self.act = partial(F.gelu, approximate="tanh") if gelu else F.silu
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.gate(x)) * self.up(x)
        return self.down(hidden if self.turn is None else self.turn(hidden))


def make_mlp(name: MLPName, width: int, hidden: int, *, bias: bool, turned: bool = False) -> MLP:
    """Return a feed-forward network from `width` through `hidden` channels and back."""
    match name:
        case "gelu":
            return GELU(width, hidden, bias=bias, turned=turned)
        case "gelu_exact":
            return GELU(width, hidden, bias=bias, exact=True, turned=turned)
        case "swiglu":
            return SwiGLU(width, hidden, bias=bias, turned=turned)
        case "geglu":
            return SwiGLU(width, hidden, bias=bias, gelu=True, turned=turned)
    assert_never(name)


MakeNorm = Callable[[NormSite], Norm]
Left = dict[Read, Tensor]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the pre-norm Transformer block.

    Whatever the kind of block, its first argument is what it received and the first of what it
    returns is its output, both (B, L, D); the second is what later layers will read of it.
    """

    def __init__(self, norm: MakeNorm, attention: Attention, mlp: MLP) -> None:
        super().__init__()
        self.attention_norm: nn.Module = norm("attention")
        self.attention = attention
        self.mlp_norm: nn.Module = norm("mlp")
        self.mlp = mlp

    def forward(self, x: Tensor, flow: Flow) -> tuple[Tensor, Left]:
        attended, left = self.attention(self.attention_norm(x), flow)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), left


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm'(x)): both halves read the block's input (GPT-NeoX)."""

    def forward(self, x: Tensor, flow: Flow) -> tuple[Tensor, Left]:
        attended, left = self.attention(self.attention_norm(x), flow)
        return x + attended + self.mlp(self.mlp_norm(x)), left


class PostBlock(Block):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def forward(self, x: Tensor, flow: Flow) -> tuple[Tensor, Left]:
        attended, left = self.attention(x, flow)
        x = self.attention_norm(x + attended)
        return self.mlp_norm(x + self.mlp(x)), left


class PeriBlock(Block):
    """x + norm'(attention(norm(x))), then x + norm'(mlp(norm(x)))."""

    def __init__(self, norm: MakeNorm, attention: Attention, mlp: MLP) -> None:
        super().__init__(norm, attention, mlp)
        self.attention_output_norm = norm("attention_output")
        self.mlp_output_norm = norm("mlp_output")

    def forward(self, x: Tensor, flow: Flow) -> tuple[Tensor, Left]:
        attended, left = self.attention(self.attention_norm(x), flow)
        x = x + self.attention_output_norm(attended)
        return x + self.mlp_output_norm(self.mlp(self.mlp_norm(x))), left


class ReorderedBlock(PeriBlock):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(self, norm: MakeNorm, attention: Attention, mlp: MLP) -> None:
        super().__init__(norm, attention, mlp)
        self.attention_norm = self.mlp_norm = nn.Identity()


class SublayerBlock(Block):
    """A block whose halves read and write through a depth mix, which adds in the plain sum's place.

    It takes the mix's state as its third argument and returns it as the third of its results.
    """

    def __init__(
        self,
        norm: MakeNorm,
        attention: Attention,
        mlp: MLP,
        *,
        layer: int,
        depth: SublayerMix,
        where: NormOrder,
    ) -> None:
        super().__init__(norm, attention, mlp)
        if where == "after":
            self.attention_norm = self.mlp_norm = nn.Identity()
        behind = where in ("after", "both")
        self.attention_output_norm = norm("attention_output") if behind else nn.Identity()
        self.mlp_output_norm = norm("mlp_output") if behind else nn.Identity()
        self.number = 2 * layer + 1
        self.depth = [depth]  # a plain list: the decoder owns the mix and its parameters
        self.projects = type(depth).projected is not SublayerMix.projected
        attention.leaves_null = depth.reads_nulls

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, flow: Flow, state: State
    ) -> tuple[Tensor, Left, State]:
        (depth,) = self.depth
        if self.projects:
            query, key, value = map(self.attention_norm, depth.projected(self.number, x, state))
            attended, left = self.attention.of_three(query, key, value, flow)
        else:
            attended, left = self.attention(self.attention_norm(x), flow)
        if depth.reads_nulls:
            state = depth.noticed(left.pop(Read("null", self.attention.layer)), state)
        x, state = depth.step(self.number, x, self.attention_output_norm(attended), state)
        out = self.mlp_output_norm(self.mlp(self.mlp_norm(x)))
        x, state = depth.step(self.number + 1, x, out, state)
        return x, left, state


BLOCKS: dict[NormOrder, type[Block]] = {
    "before": Block, "over": PostBlock, "both": PeriBlock, "after": ReorderedBlock,
}  # fmt: skip
"""By where the norms stand, in a plain stream."""
