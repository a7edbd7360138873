"""`TextStream`: a decoder's residual stream over a text, advanced layer by layer."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wakeful.model.block import Block, PeriBlock
from wakeful.model.decoder import Decoder, begins_of
from wakeful.model.hooks import hooked
from wakeful.norms.base import Norm
from wakeful.training import NO_AUTOCAST

_TOKENS_PER_BATCH = 2048
"""Tokens that go through a layer in one batch."""


class TextStream:
    """A decoder's residual stream over all of a text, at the input of layer `layer`."""

    def __init__(
        self,
        decoder: Decoder,
        tokens: Int[Tensor, "B L"],
        documents: Int[Tensor, "B L"] | None = None,
        autocast: AbstractContextManager[object] = NO_AUTOCAST,
    ) -> None:
        """Embed the text, in parts of a few sequences that fit memory; no layer runs yet.

        `documents` has each token's document number if tokens attend within their document alone.
        `autocast` is a context that the layers run in.
        """
        self.autocast = autocast
        self.blocks = [block for block in decoder.blocks if isinstance(block, Block)]
        self.layer = 0
        """The next layer that the text goes through."""
        part_size = max(1, _TOKENS_PER_BATCH // tokens.shape[1])  # in sequences
        device = decoder.embed.weight.device
        parts = tokens.to(device).split(part_size)
        numbers = (torch.zeros_like(tokens) if documents is None else documents).to(device)
        documents_of_parts = [None] * len(parts) if documents is None else numbers.split(part_size)
        self.parts = [
            decoder.before_blocks(decoder.embed(part), tokens=part, documents=part_documents)
            for part, part_documents in zip(parts, documents_of_parts, strict=True)
        ]
        """For each part the stream (B, L, D), and what blocks get besides: masks, rotations, and
        the memory of what earlier layers left for later ones."""
        self.firsts = begins_of(numbers).split(part_size)
        """For each part a mask (B, L) of the tokens that begin a sequence or document."""

    def advance(self, layer: int) -> None:
        """Run the text through the layers before `layer`, up to that layer's input."""
        while self.layer < layer:
            for number, (x, flow) in enumerate(self.parts):
                with self.autocast:
                    out, memory = self.blocks[self.layer](x, flow)
                flow.memory.update(memory)  # what later layers read of this one
                self.parts[number] = out, flow
            self.layer += 1

    def states(self) -> Iterator[Float[Tensor, "B L D"]]:
        """Yield the stream, part by part."""
        return (x for x, _ in self.parts)

    def activations(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the next layer's activations, part by part, without advancing the stream.

        Each part gives the input of the MLP's down projection (B, L, H), what the MLP adds to the
        stream (B, L, D) and the layer's output (B, L, D).
        """
        block = self.blocks[self.layer]
        down = block.mlp.down
        mlp_end = behind_mlp(block) or down  # what it puts out is added to the stream
        inputs: list[Tensor] = []
        additions: list[Tensor] = []
        see_down = hooked({"": down}, after=lambda _, args, output: inputs.append(args[0]))
        see_end = hooked({"": mlp_end}, after=lambda _, args, output: additions.append(output))
        with see_down, see_end:
            for x, flow in self.parts:
                with self.autocast:
                    out, _ = block(x, flow)
                yield inputs.pop(), additions.pop(), out


def behind_mlp(block: Block) -> Norm | None:
    """Return the norm between a block's feed-forward network and the stream; None without one."""
    if not isinstance(block, PeriBlock):
        return None
    norm = block.mlp_output_norm
    assert isinstance(norm, Norm)
    return norm
