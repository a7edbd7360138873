"""Gates of a layer's input; `output_gate`, which lets through so much of a head's output."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.roles import Role
from wakeful.routes.base import Memory, ValueRoute
from wakeful.shape import Shape

Per = Literal["head", "channel"]


class Gates(ValueRoute):
    """What routes share that have sigmoid(W h_n + b) of the normalized input h_n a layer.

    W starts at zero and b at `start`, so every gate starts at sigmoid(`start`).
    """

    nearly: float
    """The bias that all but opens or shuts a gate: one that is wide open or shut has no slope to
    learn by."""

    def __init__(self, *, start: float) -> None:
        super().__init__()
        self.start = start

    def width(self, shape: Shape) -> int:
        """Return the gates of a layer."""
        raise NotImplementedError

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, layers)
        self.gates = nn.ModuleDict()
        for layer in self.layers:
            gate = nn.Linear(shape.width, self.width(shape))
            nn.init.zeros_(gate.weight)
            nn.init.constant_(gate.bias, self.start)
            self.gates[str(layer)] = gate

    def roles(self) -> Mapping[str, Role]:
        matrix = Role(residual=1, decays=True, quantized=True)
        return {f"gates.{layer}.weight": matrix for layer in self.layers}

    @torch.no_grad()
    def start_plain(self) -> str:
        if self.start / self.nearly >= 1:
            return super().start_plain()
        for gate in self.gates.values():
            assert isinstance(gate, nn.Linear)
            gate.weight.zero_()
            gate.bias.fill_(self.nearly)
        share, end = 1 / (1 + math.exp(-self.nearly)), "wide open" if self.nearly > 0 else "shut"
        return f"{self} starts with gates of {share:.4f}, for a gate that is {end} cannot learn"

    @torch.no_grad()
    def take_over(self, reference: ValueRoute, sources: Sequence[int]) -> None:
        assert isinstance(reference, type(self))
        for layer in self.layers:
            if str(sources[layer]) in reference.gates:
                theirs = reference.gates[str(sources[layer])]
                self.gates[str(layer)].load_state_dict(theirs.state_dict())

    def gate(self, layer: int, x: Tensor) -> Tensor:
        """Return a layer's gates (B, L, width) for its normalized input x (B, L, D)."""
        return torch.sigmoid(self.gates[str(layer)](x))


class OutputGate(Gates):
    """U'_n = U_n ⊙ sigmoid(W h_n + b) before the output projection (Qiu et al., 2505.06708, G1).

    h_n is the normalized input of layer n's attention; W is (H, D), a gate a head, or (H d, D) with
    `per="channel"`. W starts at zero and b at `start`, so every gate starts at sigmoid(`start`), ½
    by default.
    """

    name = "output_gate"
    examples = ("output_gate", 'output_gate(per="channel")')
    neutral = "output_gate(start=40.0)"
    nearly = 8.0

    def __init__(self, *, per: Per = "head", start: float = 0.0) -> None:
        super().__init__(start=start)
        if per not in get_args(Per):
            raise WakefulError(f"output_gate: per must be one of {get_args(Per)}, got {per!r}")
        self.per: Per = per

    def width(self, shape: Shape) -> int:
        return shape.num_heads * (shape.head_width if self.per == "channel" else 1)

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        return u * self.gate(layer, x).unflatten(-1, (u.shape[2], -1))
