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
    """A linear layer inside a module under a given name, such as "q_proj", so that an adapter finds
    it by that name and can replace it. `role` is the role of its matrix.
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

    # Without nn.Module's __call__, which costs time: hooks belong on the layer inside.
    __call__ = forward


class NamedHeads(NamedLinear):
    """A projection into attention heads (`Heads`) under a given name, as a plain linear layer."""

    def __init__(self, name: str, heads: Heads, role: Role) -> None:
        super().__init__(name, _to_linear(heads), role)
        self.heads = heads.heads
        self.rotary: RotationName = heads.rotary
        self.norm = heads.norm

    def forward(self, x: Tensor, flow: Flow) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        projected = self._modules[self.name](x)  # pyright: ignore[reportOptionalCall]
        return into_heads(projected, self.heads, self.norm, flow, rotary=self.rotary)

    __call__ = forward  # pyright: ignore[reportAssignmentType]


def name_projections(decoder: Decoder) -> None:
    """Wrap every projection of a decoder, in place, so that peft finds it under the name that it
    has in a Llama: `attention.query` becomes `attention.query.q_proj`, a plain linear layer.
    """
    for block in decoder.blocks:
        roles = roles_of(block)  # of the matrices under their names before they are wrapped
        for path, name in PROJECTION_NAMES.items():
            sublayer_name, _, key = path.partition(".")  # such as "attention" and "query"
            sublayer = block.get_submodule(sublayer_name)
            module = sublayer._modules.get(key)
            if isinstance(module, Heads):
                setattr(sublayer, key, NamedHeads(name, module, roles[f"{path}.weight"]))
            elif isinstance(module, nn.Linear):
                setattr(sublayer, key, NamedLinear(name, module, roles[f"{path}.weight"]))


def projection_name(parameter: str) -> str:
    """Return a decoder parameter's name after `name_projections`, such as
    "blocks.0.mlp.up.up_proj.weight" for "blocks.0.mlp.up.weight".
    """
    parent, _, leaf = parameter.rpartition(".")
    name = PROJECTION_NAMES.get(".".join(parent.split(".")[-2:]))
    return f"{parent}.{name}.{leaf}" if name else parameter


def _to_linear(heads: Heads) -> nn.Linear:
    """Return a projection into heads as a plain linear layer that shares its weight and bias."""
    with torch.device("meta"):
        linear = nn.Linear(heads.in_features, heads.out_features, bias=heads.bias is not None)
    linear.weight, linear.bias = heads.weight, heads.bias
    return linear
