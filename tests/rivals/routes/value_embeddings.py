"""Value embeddings: a token's id adds to its value."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from wakeful.routes.base import EMBEDDED, QKV, TOKENS, Memory, Read, ValueRoute
from wakeful.shape import Shape


class ValueEmbeddings(ValueRoute):
    """V'_n = V_n + g_n E_n[token] in every second layer, and x_0 W_n too where `stream`."""

    name = "value_embeddings"
    examples = ("value_embeddings", "value_embeddings(stream=True)")
    mixes = frozenset({"value"})

    def __init__(self, *, stream: bool = False) -> None:
        super().__init__()
        self.stream = stream

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, [layer for layer in layers if layer % 2])
        wide = shape.num_kv_heads * shape.head_width
        self.tables = nn.ModuleDict(
            {str(n): nn.Embedding(shape.vocab_size, wide) for n in self.layers}
        )
        self.gains = nn.Parameter(torch.ones(shape.num_layers // 2))
        if self.stream:
            self.maps = nn.ModuleDict(
                {str(n): nn.Linear(shape.width, wide, bias=False) for n in self.layers}
            )
        for name, parameter in self.named_parameters():
            if name != "gains":
                nn.init.zeros_(parameter)

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({TOKENS, EMBEDDED}) if self.stream else frozenset({TOKENS})

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        gain = self.gains[layer // 2].to(x.dtype)
        more = gain * self.tables[str(layer)](memory[TOKENS])
        if self.stream:
            more = more + self.maps[str(layer)](memory[EMBEDDED])
        return qkv._replace(v=qkv.v + more.view_as(qkv.v))
