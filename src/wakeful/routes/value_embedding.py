"""Value embeddings: a table looked up by token id, added to the values."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.routes.base import QKV, TOKENS, Basis, Memory, Read, ValueRoute
from wakeful.routes.gates import Gates
from wakeful.variants.roles import Role
from wakeful.variants.shape import Shape


class ValueEmbedding(Gates):
    """V'_n = V_n + g(h_n) E_n[token], g = c sigmoid(W_n h_n), a gate per key/value head and token.

    As in nanochat, which took it from modded-nanogpt: each layer has its own table E_n (V, G d),
    W_n reads the first `channels` channels of the attention's normalized input, and c is `peak`. W
    starts at zero, E as other tables do. One layer in `every` has a table, counted back from the
    decoder's last layer.
    """

    name = "value_embedding"
    examples = ("value_embedding", "value_embedding(every=1, peak=2.0, channels=0)")
    neutral = "value_embedding(peak=0.0)"
    mixes = frozenset({"value"})
    biased = False

    def __init__(self, *, every: int = 2, channels: int = 12, peak: float = 3.0) -> None:
        """Store the options: one layer in `every` has a table, its gates read the first `channels`
        of the input (0: all), and a gate is at most `peak`.

        Raises:
            WakefulError: `every` is less than 1.
        """
        super().__init__(start=0.0, channels=channels)
        if every < 1:
            raise WakefulError(f"value_embedding: every must be at least 1 layer, got {every}")
        self.every = every
        self.peak = peak

    def width(self, shape: Shape) -> int:
        return shape.num_kv_heads

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        """Create gates and a table (V, G d) for each of `layers` whose distance from the decoder's
        last layer is a multiple of `every`.
        """
        last = shape.num_layers - 1
        layers_with_table = [layer for layer in layers if (last - layer) % self.every == 0]
        super().attach(shape, layers_with_table)  # creates the gates
        table_width = shape.num_kv_heads * shape.head_width
        self.tables = nn.ModuleDict(
            {str(layer): nn.Embedding(shape.vocab_size, table_width) for layer in self.layers}
        )

    def roles(self) -> Mapping[str, Role]:
        table = Role(vocabulary=True, embedding=True, decays=True, start="normal")
        tables = {f"tables.{layer}.weight": table for layer in self.layers}
        return {**super().roles(), **tables}

    def single_channels(self) -> Mapping[Basis, str]:
        return {**super().single_channels(), "values": "has tables of its own for"}

    @torch.no_grad()
    def start_plain(self) -> str:
        """Set the tables to zero, so that nothing is added, and return ""."""
        for table in self.tables.parameters():
            table.zero_()
        return ""

    def take_over(self, reference: ValueRoute, sources: Sequence[int]) -> None:
        """Copy the table and gates of each layer n from layer `sources[n]` of the reference.

        Raises:
            WakefulError: a layer that had a table in the reference has none here.
        """
        for layer, source in enumerate(sources):
            if source in reference.layers and layer not in self.layers:
                raise WakefulError(
                    f"{self} gives layer {layer} no table, and the layer {source} that it inherits "
                    "has one: keep a number of layers that leaves tables where they are"
                )
        super().take_over(reference, sources)

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({TOKENS})

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        """Return the heads with the values V + c sigmoid(W x) E[token]: E is the layer's table, W
        its gates' matrix, and c is `peak`.
        """
        embeddings = self.tables[str(layer)](memory[TOKENS]).to(qkv.v.dtype)  # (B, L, G d)
        gate = self.gate_logits(layer, x).sigmoid().unsqueeze(-1)  # (B, L, G, 1)
        by_head = embeddings.unflatten(-1, qkv.v.shape[2:])
        return qkv._replace(v=torch.addcmul(qkv.v, gate, by_head, value=self.peak))
