"""The projections of a decoder under the names that adapters look for."""

import re
from collections import OrderedDict

import torch
from torch import Tensor, nn

from wakeful.model.attention import Heads, into_heads
from wakeful.model.decoder import Decoder
from wakeful.model.flow import Flow

NAMES = {
    "attention.query": "q_proj",
    "attention.key": "k_proj",
    "attention.value": "v_proj",
    "attention.out": "o_proj",
    "mlp.gate": "gate_proj",
    "mlp.up": "up_proj",
    "mlp.down": "down_proj",
}
"""What a Llama calls each projection of a block."""
_OWNED = re.compile(rf"\.({'|'.join(NAMES)})\.(weight|bias)$".replace("attention.", r"attention\."))


class NamedHeads(nn.Module):
    """`Heads` whose matrix is a plain linear layer, so that LoRA can take its place."""

    def __init__(self, name: str, heads: Heads) -> None:
        super().__init__()
        self.name = name
        self.heads = heads.heads
        self.rotary = heads.rotary
        self.norm = heads.norm
        self.add_module(name, _plain(heads))

    def forward(self, x: Tensor, flow: Flow) -> Tensor:
        projected = self._modules[self.name](x)  # pyright: ignore[reportOptionalCall]
        return into_heads(projected, self.heads, self.norm, flow, rotary=self.rotary)


def name_projections(decoder: Decoder) -> None:
    """Put every projection of a decoder, in place, under the name it has in a Llama.

    `attention.query` becomes `attention.query.q_proj` and so on, plain linear layers all.
    """
    for block in decoder.blocks:
        for place, name in NAMES.items():
            half, _, part = place.partition(".")
            parent = block.get_submodule(half)
            module = parent._modules.get(part)
            if isinstance(module, Heads):
                setattr(parent, part, NamedHeads(name, module))
            elif isinstance(module, nn.Linear):
                setattr(parent, part, nn.Sequential(OrderedDict([(name, module)])))


def named(parameter: str) -> str:
    """Return what a decoder's parameter is called once its projections are named."""
    return _OWNED.sub(lambda found: f".{found[1]}.{NAMES[found[1]]}.{found[2]}", parameter)


def _plain(heads: Heads) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(heads.in_features, heads.out_features, bias=heads.bias is not None)
    linear.weight, linear.bias = heads.weight, heads.bias
    return linear
