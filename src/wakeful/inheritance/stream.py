"""`TextStream`: a decoder's residual stream over a text, taken on layer by layer."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wakeful.model.block import Block, PeriBlock
from wakeful.model.decoder import Decoder, begins_of
from wakeful.model.hooks import hooked
from wakeful.norms.base import Norm
from wakeful.training import AS_IT_IS

_AT_ONCE = 2048
"""Tokens that go through a layer together."""


class TextStream:
    """A decoder's stream over all of a text, as far as its first layers take it."""

    def __init__(
        self,
        decoder: Decoder,
        tokens: Int[Tensor, "B L"],
        documents: Int[Tensor, "B L"] | None = None,
        autocast: AbstractContextManager[object] = AS_IT_IS,
    ) -> None:
        self.autocast = autocast
        self.blocks = [block for block in decoder.blocks if isinstance(block, Block)]
        self.layer = 0
        rows = max(1, _AT_ONCE // tokens.shape[1])
        device = decoder.embed.weight.device
        parts = tokens.to(device).split(rows)
        numbers = (torch.zeros_like(tokens) if documents is None else documents).to(device)
        divided = [None] * len(parts) if documents is None else numbers.split(rows)
        self.parts = [
            decoder.before_blocks(decoder.embed(part), tokens=part, documents=own)
            for part, own in zip(parts, divided, strict=True)
        ]
        self.firsts = begins_of(numbers).split(rows)
        """Which tokens are the first that their row, or document, has: (B, L) a part."""

    def through(self, layer: int) -> None:
        """Go on to what the layer of this number receives."""
        while self.layer < layer:
            for number, (x, flow) in enumerate(self.parts):
                with self.autocast:
                    out, left = self.blocks[self.layer](x, flow)
                flow.memory.update(left)
                self.parts[number] = out, flow
            self.layer += 1

    def copy(self) -> "TextStream":
        """Return the stream as far as it is, to go on with apart."""
        found = copy.copy(self)
        found.parts = list(self.parts)
        return found

    def states(self) -> Iterator[Float[Tensor, "B L D"]]:
        """Yield the stream, part by part."""
        return (x for x, _ in self.parts)

    def seen(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield what the next layer's `down` reads (B, L, H), what its feed-forward network adds to
        the stream (B, L, D), and what the layer puts out (B, L, D), part by part.
        """
        block = self.blocks[self.layer]
        down = block.mlp.down
        last = behind_mlp(block) or down
        read: list[Tensor] = []
        added: list[Tensor] = []
        see_down = hooked({"": down}, after=lambda _, args, output: read.append(args[0]))
        see_last = hooked({"": last}, after=lambda _, args, output: added.append(output))
        with see_down, see_last:
            for x, flow in self.parts:
                with self.autocast:
                    out, _ = block(x, flow)
                yield read.pop(), added.pop(), out


def behind_mlp(block: Block) -> Norm | None:
    """Return the norm between a block's feed-forward network and the stream, where it has one."""
    if not isinstance(block, PeriBlock):
        return None
    norm = block.mlp_output_norm
    assert isinstance(norm, Norm)
    return norm
