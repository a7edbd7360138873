"""A gated value residual."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from wakeful.roles import Role
from wakeful.routes.base import FIRST_VALUE, QKV, Memory, Read, ValueRoute
from wakeful.shape import Shape

_NEARLY_SHUT = -8.0
"""A gate's bias that lets 0.03% of V_1 through: a gate has no zero from which it could learn."""


class Gated(ValueRoute):
    """V'_n = V_n + g(h_n) V_1 with g = sigmoid(W h_n + b), one gate a key/value head and token.

    h_n is the normalized input of layer n's attention. W starts at zero and b at `start`, so every
    gate starts at sigmoid(`start`), ½ by default.
    """

    examples = ("gated",)
    neutral = "gated(start=-40.0)"
    mixes = frozenset({"value"})

    def __init__(self, *, start: float = 0.0) -> None:
        super().__init__()
        self.start = start

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, [layer for layer in layers if layer > 0])
        self.gates = nn.ModuleDict()
        for layer in self.layers:
            gate = nn.Linear(shape.width, shape.num_kv_heads)
            nn.init.zeros_(gate.weight)
            nn.init.constant_(gate.bias, self.start)
            self.gates[str(layer)] = gate

    def roles(self) -> Mapping[str, Role]:
        matrix = Role(residual=1, decays=True, quantized=True)
        return {f"gates.{layer}.weight": matrix for layer in self.layers}

    @torch.no_grad()
    def start_plain(self) -> str:
        if self.start <= _NEARLY_SHUT:
            return super().start_plain()
        for gate in self._gates():
            gate.weight.zero_()
            gate.bias.fill_(_NEARLY_SHUT)
        return f"{self} starts with gates of 0.0003, for a gate that is shut cannot learn"

    @torch.no_grad()
    def take_over(self, reference: ValueRoute, sources: Sequence[int]) -> None:
        assert isinstance(reference, Gated)
        for layer in self.layers:
            if str(sources[layer]) in reference.gates:
                theirs = reference.gates[str(sources[layer])]
                self.gates[str(layer)].load_state_dict(theirs.state_dict())

    def _gates(self) -> list[nn.Linear]:
        return [gate for gate in self.gates.values() if isinstance(gate, nn.Linear)]

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({FIRST_VALUE})

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        gate = torch.sigmoid(self.gates[str(layer)](x)).unsqueeze(-1)
        return qkv._replace(v=qkv.v + gate * memory[FIRST_VALUE])
