"""One layer of the decoder: attention, feed-forward network and the placement of its norms."""

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.config.model import MLPName
from wakeful.depth.base import State, SublayerMix
from wakeful.model.attention import Attention, Flow
from wakeful.model.turned import WalshHadamard
from wakeful.norms.base import Norm, NormSite
from wakeful.placements import NormOrder
from wakeful.routes.base import Read
from wakeful.variants.roles import BIAS, READS, WRITES, HasRoles, Role

_TANH = partial(F.gelu, approximate="tanh")
_ACTIVATIONS: dict[MLPName, tuple[Callable[[Tensor], Tensor], bool]] = {
    "gelu": (_TANH, False),
    "gelu_exact": (F.gelu, False),
    "swiglu": (F.silu, True),
    "geglu": (_TANH, True),
}
"""Activation function of each network, and True if it has a gate."""


class MLP(HasRoles, nn.Module):
    """down(act(up(x))), or with a gate down(act(gate(x)) · up(x)) (Shazeer 2020).

    GELU is by its tanh form as in GPT-2 and Gemma, or by the error function (`gelu_exact`). `turn`
    acts on the hidden channels before `down`, where there is one.
    """

    def __init__(
        self, name: MLPName, width: int, hidden: int, *, bias: bool, turned: bool = False
    ) -> None:
        """Make the layers of a network of the kind `name` with `hidden` hidden channels.

        With `turned`, the hidden channels are rotated before `down` reads them.
        """
        super().__init__()
        self.act, gated = _ACTIVATIONS[name]
        self.turn = WalshHadamard() if turned else None
        self.gate = nn.Linear(width, hidden, bias=bias) if gated else None
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def roles(self) -> Mapping[str, Role]:
        into = dict.fromkeys(("gate.weight", "up.weight"), READS)
        biases = dict.fromkeys(("gate.bias", "up.bias", "down.bias"), BIAS)
        return {"down.weight": WRITES, **into, **biases}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x)
        if self.turn is not None:
            hidden = self.turn(hidden)
        return self.down(hidden)


MakeNorm = Callable[[NormSite], Norm]
SharedTensors = dict[Read, Tensor]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the pre-norm Transformer block.

    Every kind of block takes its input (B, L, D) as the first argument and returns its output
    (B, L, D) and the tensors that later layers read.
    """

    def __init__(self, norm: MakeNorm, attention: Attention, mlp: MLP) -> None:
        """Take the two sublayers, and let `norm` make the norm of each."""
        super().__init__()
        self.attention_norm: nn.Module = norm("attention")
        self.attention = attention
        self.mlp_norm: nn.Module = norm("mlp")
        self.mlp = mlp

    def forward(self, x: Tensor, flow: Flow) -> tuple[Tensor, SharedTensors]:
        attended, shared = self.attention(self.attention_norm(x), flow)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), shared


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm'(x)): both halves read the block's input (GPT-NeoX)."""

    def forward(self, x: Tensor, flow: Flow) -> tuple[Tensor, SharedTensors]:
        attended, shared = self.attention(self.attention_norm(x), flow)
        return x + attended + self.mlp(self.mlp_norm(x)), shared


class PostBlock(Block):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def forward(self, x: Tensor, flow: Flow) -> tuple[Tensor, SharedTensors]:
        attended, shared = self.attention(x, flow)
        x = self.attention_norm(x + attended)
        return self.mlp_norm(x + self.mlp(x)), shared


class PeriBlock(Block):
    """x + norm'(attention(norm(x))), then x + norm'(mlp(norm(x))).

    `where` says which norms a sublayer has: norm "before" it, norm' "after" it, or "both"; the
    other one is the identity.
    """

    def __init__(
        self, norm: MakeNorm, attention: Attention, mlp: MLP, *, where: NormOrder = "both"
    ) -> None:
        """Let `norm` make each sublayer's norms: one "before" it, one "after" it or "both", as
        `where` says. Identities take the place of the others.
        """
        super().__init__(norm, attention, mlp)
        if where == "after":  # replaces the norms before, which every block makes
            self.attention_norm = self.mlp_norm = nn.Identity()
        norms_output = where in ("after", "both")
        self.attention_output_norm = norm("attention_output") if norms_output else nn.Identity()
        self.mlp_output_norm = norm("mlp_output") if norms_output else nn.Identity()

    def forward(self, x: Tensor, flow: Flow) -> tuple[Tensor, SharedTensors]:
        attended, shared = self.attention(self.attention_norm(x), flow)
        x = x + self.attention_output_norm(attended)
        return x + self.mlp_output_norm(self.mlp(self.mlp_norm(x))), shared


class SublayerBlock(PeriBlock):
    """A block whose sublayers read and write through a depth mix instead of the plain sum.

    It takes the mix's state as its third argument and returns it as its third result.
    """

    def __init__(
        self, norm: MakeNorm, attention: Attention, mlp: MLP, *,
        layer: int, depth: SublayerMix, where: NormOrder,
    ) -> None:  # fmt: skip
        """Make the norms before or after the sublayers, as `where` says. `layer` is the block's
        number from 0, and `depth` the depth mix, one for all blocks.
        """
        super().__init__(norm, attention, mlp, where=where)
        self.sublayer_index = 2 * layer + 1
        """Index of the attention among all sublayers, from 1; the MLP has the next."""
        self.depth = [depth]  # a plain list: the decoder owns the mix and its parameters
        # True if the mix's class overrides the method that gives q, k and v separate inputs.
        self.mixes_qkv = type(depth).qkv_inputs is not SublayerMix.qkv_inputs

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, flow: Flow, state: State
    ) -> tuple[Tensor, SharedTensors, State]:
        """Run attention and MLP; return the next block's input, the tensors that later layers read,
        and the depth mix's state.

        After each sublayer the mix computes the next sublayer's input from the sublayer's output
        and the state. If it `mixes_qkv`, queries, keys and values have separate inputs.
        """
        (depth,) = self.depth  # a list of one, so that the mix is no submodule of the block
        if self.mixes_qkv:
            query, key, value = map(
                self.attention_norm, depth.qkv_inputs(self.sublayer_index, x, state)
            )
            attended, shared = self.attention.forward_qkv(query, key, value, flow)
        else:
            attended, shared = self.attention(self.attention_norm(x), flow)
        x, state = depth.step(self.sublayer_index, x, self.attention_output_norm(attended), state)
        out = self.mlp_output_norm(self.mlp(self.mlp_norm(x)))
        x, state = depth.step(self.sublayer_index + 1, x, out, state)
        return x, shared, state


BLOCKS: dict[NormOrder, Callable[..., Block]] = {
    "before": Block, "over": PostBlock, "both": PeriBlock,
    "after": partial(PeriBlock, where="after"),
}  # fmt: skip
"""Blocks by placement of the norms, for models without a depth mix of sublayers."""
