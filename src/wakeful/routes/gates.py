"""`output_gate`: what the layer's input lets through of a head's output."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.roles import Role
from wakeful.routes.base import Memory, ValueRoute
from wakeful.shape import Shape

Per = Literal["head", "channel"]

_NEARLY_OPEN = 8.0
"""A gate's bias that lets 99.97% through: a gate that is wide open has no slope to learn by."""


class OutputGate(ValueRoute):
    """U'_n = U_n ⊙ sigmoid(W h_n + b) before the output projection (Qiu et al., 2505.06708, G1).

    h_n is the normalized input of layer n's attention; W is (H, D), a gate a head, or (H d, D) with
    `per="channel"`. W starts at zero and b at `start`, so every gate starts at sigmoid(`start`), ½
    by default.
    """

    name = "output_gate"
    examples = ("output_gate", 'output_gate(per="channel")')
    neutral = "output_gate(start=40.0)"

    def __init__(self, *, per: Per = "head", start: float = 0.0) -> None:
        super().__init__()
        if per not in get_args(Per):
            raise WakefulError(f"output_gate: per must be one of {get_args(Per)}, got {per!r}")
        self.per: Per = per
        self.start = start

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, layers)
        self.gates = nn.ModuleDict()
        for layer in self.layers:
            channels = shape.head_width if self.per == "channel" else 1
            gate = nn.Linear(shape.width, shape.num_heads * channels)
            nn.init.zeros_(gate.weight)
            nn.init.constant_(gate.bias, self.start)
            self.gates[str(layer)] = gate

    def roles(self) -> Mapping[str, Role]:
        matrix = Role(residual=1, decays=True, quantized=True)
        return {f"gates.{layer}.weight": matrix for layer in self.layers}

    @torch.no_grad()
    def start_plain(self) -> str:
        if self.start >= _NEARLY_OPEN:
            return super().start_plain()
        for gate in self._gates():
            gate.weight.zero_()
            gate.bias.fill_(_NEARLY_OPEN)
        return f"{self} starts with gates of 0.9997, for a gate that is wide open cannot learn"

    @torch.no_grad()
    def take_over(self, reference: ValueRoute, sources: Sequence[int]) -> None:
        assert isinstance(reference, OutputGate)
        for layer in self.layers:
            if str(sources[layer]) in reference.gates:
                theirs = reference.gates[str(sources[layer])]
                self.gates[str(layer)].load_state_dict(theirs.state_dict())

    def _gates(self) -> list[nn.Linear]:
        return [gate for gate in self.gates.values() if isinstance(gate, nn.Linear)]

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        gate = torch.sigmoid(self.gates[str(layer)](x))
        return u * gate.unflatten(-1, (u.shape[2], -1))
