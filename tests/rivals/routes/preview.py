"""Values get what a token's id and its embedding say: a route that reads both before the layers."""

from collections.abc import Iterable

from torch import Tensor, nn

from wakeful.routes.base import EMBEDDED, QKV, TOKENS, Memory, Read, ValueRoute
from wakeful.variants.shape import Shape


class Preview(ValueRoute):
    """V'_n = V_n + E_n[token] + x_0 W_n in every second layer, E and W zero at the start."""

    examples = ("preview",)
    mixes = frozenset({"value"})

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, [layer for layer in layers if layer % 2])
        wide = shape.num_kv_heads * shape.head_width
        self.tables, self.maps = nn.ModuleDict(), nn.ModuleDict()
        for n in self.layers:
            self.tables[str(n)] = nn.Embedding(shape.vocab_size, wide)
            self.maps[str(n)] = nn.Linear(shape.width, wide, bias=False)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({TOKENS, EMBEDDED})

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        more = self.tables[str(layer)](memory[TOKENS]) + self.maps[str(layer)](memory[EMBEDDED])
        return qkv._replace(v=qkv.v + more.view_as(qkv.v))
