"""The base class of gated routes, and `output_gate`, a gate on each head's output."""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.routes.base import Basis, Memory, ValueRoute
from wakeful.variants import variant_name
from wakeful.variants.roles import Role
from wakeful.variants.shape import Shape

GatePer = Literal["head", "channel"]
GateFunction = Literal["sigmoid", "softplus"]
_SOFTPLUS_1 = math.log(math.e - 1)
"""The number whose softplus is 1."""


class Gates(ValueRoute):
    """Base class of routes with gates W h_n + b, h_n the normalized input of layer n's attention.

    W starts at zero and b at `start`; with `channels` W reads only the first channels of h_n.
    """

    by_layer = True
    biased = True
    """True if there is a bias b."""
    deviation = 0.0
    """Standard deviation of W at the start, for gates that have no gradient at W = 0."""

    plain_bias: float
    """The bias at which a gate is almost open or shut; a saturated gate would have no gradient."""

    def __init__(self, *, start: float, channels: int) -> None:
        super().__init__()
        self.start = start
        self.channels = channels

    def width(self, shape: Shape) -> int:
        """Return the number of gates in a layer."""
        raise NotImplementedError

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        """Create for each layer the linear map from the attention's input, or its first `channels`
        channels, to the gates' logits.

        Raises:
            WakefulError: `channels` is negative or more than the width.
        """
        super().attach(shape, layers)
        if not 0 <= self.channels <= shape.width:
            raise WakefulError(
                f"{variant_name(type(self))}: channels must be at most the width {shape.width}, or "
                f"0 for all of them, got {self.channels}"
            )
        self.gates = nn.ModuleDict()
        for layer in self.layers:
            num_inputs = self.channels or shape.width
            gate = nn.Linear(num_inputs, self.width(shape), bias=self.biased)
            nn.init.normal_(gate.weight, std=self.deviation)
            if self.biased:
                nn.init.constant_(gate.bias, self.start)
            self.gates[str(layer)] = gate

    def roles(self) -> Mapping[str, Role]:
        # A matrix that reads only some channels of the stream does not admit another basis.
        matrix = Role(residual=None if self.channels else 1, decays=True, quantized=True)
        return {f"gates.{layer}.weight": matrix for layer in self.layers}

    def single_channels(self) -> Mapping[Basis, str]:
        return {"stream": f"reads the first {self.channels} of"} if self.channels else {}

    @torch.no_grad()
    def start_plain(self) -> str:
        """Set all gates nearly open or nearly shut (`plain_bias`), so that the route changes as
        little as it can while the gates still learn. Return a sentence on what it changes.

        Gates that `start` sets further open or shut than that stay as they are.
        """
        if self.start / self.plain_bias >= 1:  # of the same sign, and at least as large
            return super().start_plain()
        for gate in self.gates.values():
            assert isinstance(gate, nn.Linear)
            gate.weight.zero_()
            gate.bias.fill_(self.plain_bias)
        value = 1 / (1 + math.exp(-self.plain_bias))
        end = "wide open" if self.plain_bias > 0 else "shut"
        return f"{self} starts with gates of {value:.4f}, for a gate that is {end} cannot learn"

    def gate_logits(self, layer: int, x: Tensor) -> Tensor:
        """Return W h_n + b (B, L, width) for a layer's normalized input x (B, L, D)."""
        return self.gates[str(layer)](x[..., : self.channels] if self.channels else x)


class OutputGate(Gates):
    """U'_n = U_n ⊙ sigmoid(W h_n + b) before the output projection (Qiu et al., 2505.06708, G1).

    h_n is the normalized input of layer n's attention; W is (H, D), one gate per head, or (H d, D)
    with `per="channel"`. W starts at zero and b at `start`, so every gate starts at
    sigmoid(`start`), ½ by default; b and this start are ours. With `channels` W reads the first
    channels of h_n (modded-nanogpt: 12). With `gate="softplus"` it is ln(1 + e^{W h_n + b}), which
    has no upper bound, as in Laguna (Transformers' `LagunaAttention`).
    """

    name = "output_gate"
    examples = (
        "output_gate",
        'output_gate(per="channel")',
        "output_gate(channels=12)",
        'output_gate(gate="softplus")',
    )
    neutral = "output_gate(start=40.0)"
    plain_bias = 8.0

    def __init__(
        self,
        *,
        per: GatePer = "head",
        start: float = 0.0,
        channels: int = 0,
        gate: GateFunction = "sigmoid",
    ) -> None:
        """Store the options: one gate `per` head or channel, of which `gate` is the function and
        `start` the initial bias. It reads the first `channels` of the input, 0 for all.
        """
        super().__init__(start=start, channels=channels)
        self.per: GatePer = per
        self.gate: GateFunction = gate

    def width(self, shape: Shape) -> int:
        return shape.num_heads * (shape.head_width if self.per == "channel" else 1)

    def single_channels(self) -> Mapping[Basis, str]:
        gated: Mapping[Basis, str] = {"values": "has a gate for each of"}
        return {**super().single_channels(), **(gated if self.per == "channel" else {})}

    @torch.no_grad()
    def start_plain(self) -> str:
        """Open the gates: set those of softplus to exactly 1, and those of a sigmoid as near to 1
        as they can still learn. Return a sentence on what the route changes, "" if nothing.
        """
        if self.gate == "sigmoid":
            return super().start_plain()
        for name, parameter in self.gates.named_parameters():
            parameter.fill_(_SOFTPLUS_1 if name.endswith("bias") else 0.0)
        return ""

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        """Return the attention output `u` (B, L, H, d) times the gates that `x` gives."""
        logits = self.gate_logits(layer, x)
        gate = logits.sigmoid() if self.gate == "sigmoid" else F.softplus(logits)
        return u * gate.unflatten(-1, (u.shape[2], -1))
