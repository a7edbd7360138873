"""The projections of a decoder under the names that adapters look for."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from wakeful.config.model import RotationName
from wakeful.model.attention import Flow, Heads, into_heads
from wakeful.model.decoder import Decoder
from wakeful.variants.roles import BIAS, HasRoles, Role, roles_of

PROJECTION_NAMES = {
    "attention.query": "q_proj",
    "attention.key": "k_proj",
    "attention.value": "v_proj",
    "attention.out": "o_proj",
    "mlp.gate": "gate_proj",
    "mlp.up": "up_proj",
    "mlp.down": "down_proj",
}
"""Names in a Llama of the projections of a block."""


class NamedLinear(HasRoles, nn.Module):
    """A linear layer under a name of its own, so that an adapter can find it and take its place.

    `role` is its matrix's.
    """

    def __init__(self, name: str, linear: nn.Linear, role: Role) -> None:
        super().__init__()
        self.name = name
        self.role = role
        self.add_module(name, linear)

    def roles(self) -> Mapping[str, Role]:
        return {f"{self.name}.weight": self.role, f"{self.name}.bias": BIAS}

    def forward(self, x: Tensor) -> Tensor:
        return self._modules[self.name](x)  # pyright: ignore[reportOptionalCall]

    # Only a name: hooks belong on the layer inside, and every token pays for a module's call.
    __call__ = forward


class NamedHeads(NamedLinear):
    """The same for `Heads`."""

    def __init__(self, name: str, heads: Heads, role: Role) -> None:
        super().__init__(name, _plain(heads), role)
        self.heads = heads.heads
        self.rotary: RotationName = heads.rotary
        self.norm = heads.norm

    def forward(self, x: Tensor, flow: Flow) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        projected = self._modules[self.name](x)  # pyright: ignore[reportOptionalCall]
        return into_heads(projected, self.heads, self.norm, flow, rotary=self.rotary)

    __call__ = forward  # pyright: ignore[reportAssignmentType]


def name_projections(decoder: Decoder) -> None:
    """Put every projection of a decoder, in place, under the name it has in a Llama.

    `attention.query` becomes `attention.query.q_proj` and so on, plain linear layers all.
    """
    for block in decoder.blocks:
        roles = roles_of(block)
        for path, name in PROJECTION_NAMES.items():
            half, _, part = path.partition(".")
            parent = block.get_submodule(half)
            module = parent._modules.get(part)
            if isinstance(module, Heads):
                setattr(parent, part, NamedHeads(name, module, roles[f"{path}.weight"]))
            elif isinstance(module, nn.Linear):
                setattr(parent, part, NamedLinear(name, module, roles[f"{path}.weight"]))


def projection_name(parameter: str) -> str:
    """Return what a decoder's parameter is called once its projections are named."""
    parent, _, leaf = parameter.rpartition(".")
    name = PROJECTION_NAMES.get(".".join(parent.split(".")[-2:]))
    return f"{parent}.{name}.{leaf}" if name else parameter


def _plain(heads: Heads) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(heads.in_features, heads.out_features, bias=heads.bias is not None)
    linear.weight, linear.bias = heads.weight, heads.bias
    return linear
