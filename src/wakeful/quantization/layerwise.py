"""A model's blocks, each run over all of a text before the next.

The products XᵀX of all layers' inputs may not fit memory, and a pass over the model for each few of
them would take as many passes as there are blocks. So every sequence goes through one block, and
its output waits for the next one's turn.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from wakeful.probes.running import blocks_of, logits_of, named_blocks
from wakeful.quantization.linear import matrix

PRODUCTS = 2**30
"""Bytes that the products of inputs may take at a time, or one layer's."""
_PROBED = 8
"""Tokens on which it is seen whether a block reads what the one before it gave, and no other."""


class Enough(Exception):
    """Raised inside of a model that has run the block that is its turn."""


def portions(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    text: Sequence[Tensor],
    *,
    follows: bool = False,
) -> Iterator[dict[str, nn.Module]]:
    """Yield the layers by parts whose XᵀX fit into `PRODUCTS` bytes together.

    While a part is out, the model that reads all of `text` in order runs one block and then raises
    `Enough`. Where its blocks read more than the one before, or all is one part, it runs as ever.

    With `follows` no part goes past a block, and a block whose layers the caller has exchanged runs
    again, so that the next ones read what the exchanged ones give.
    """
    several = follows or not fit(layers)
    walks = several and _walks(model, text[0][:, :_PROBED])
    by_block = list(_by_block(model, layers)) if walks or follows else [layers]
    if not walks:
        for inside in by_block:
            yield from _parts(inside)
        return
    walk = _Walk(list(blocks_of(model)), len(text))
    for number, inside in enumerate(by_block):
        with walk.at(number):
            yield from _parts(inside)
            if number < len(walk.blocks) and (follows or not inside):
                walk.run(model, text)
        walk.advance()


def onward(
    model: nn.Module, layers: Mapping[str, nn.Module], text: Sequence[Tensor]
) -> Iterator[list[str]]:
    """Yield layers' names block by block, and last those of none.

    While a part is out, the model that reads all of `text` in order begins with the part's block,
    on what the earlier ones gave with the layers that they had when their parts were done. Where
    blocks read more than the one before, and for layers of no block, it runs as ever.
    """
    if not _walks(model, text[0][:, :_PROBED]):
        yield list(layers)
        return
    walk = _Walk(list(blocks_of(model)), len(text))
    for number, inside in enumerate(_by_block(model, layers)):
        if number == len(walk.blocks):
            yield list(inside)
            return
        with walk.at(number, onward=True):
            yield list(inside)
        with walk.at(number):
            walk.run(model, text)
        walk.advance()


def fit(layers: Mapping[str, nn.Module]) -> bool:
    """Tell whether the XᵀX of all of the layers fit into `PRODUCTS` bytes together."""
    return len(list(_parts(layers))) <= 1


class _Walk:
    """Outputs of the block before, sequence by sequence."""

    def __init__(self, blocks: Sequence[nn.Module], sequences: int) -> None:
        self.blocks = blocks
        self.before: list[Any] = [None] * sequences
        self.after: list[Any] = [None] * sequences
        self.now = -1

    @contextmanager
    def at(self, number: int, *, onward: bool = False) -> Iterator[None]:
        """Let the model run that block alone, or `onward` from it, and all around the blocks."""
        replaced = self.blocks[:number] if onward else self.blocks
        own = {block: vars(block).get("forward") for block in replaced}
        try:
            for index, block in enumerate(replaced):
                block.forward = self._step(index, number, block.forward)
            yield
        finally:
            for block, forward in own.items():
                del block.forward  # the instance's, before the class' own
                if forward is not None:  # accelerate puts one there
                    block.forward = forward

    def advance(self) -> None:
        """Let the next block read what this one gave."""
        self.before, self.after = self.after, [None] * len(self.before)

    def _step(self, index: int, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if index == 0:
                self.now = (self.now + 1) % len(self.before)
            if index < number:
                return self.before[self.now]
            self.after[self.now] = forward(*args, **kwargs)
            raise Enough

        return step

    @torch.no_grad()
    def run(self, model: nn.Module, text: Sequence[Tensor]) -> None:
        for tokens in text:
            with suppress(Enough):
                logits_of(model, tokens)


@torch.no_grad()
def _walks(model: nn.Module, tokens: Tensor) -> bool:
    """Tell whether a model gives the same logits where its blocks are run one by one."""
    blocks = list(blocks_of(model))
    walk = _Walk(blocks, 1)
    expected = logits_of(model, tokens)
    try:
        for number in range(len(blocks)):
            with walk.at(number):
                walk.run(model, [tokens])
            walk.advance()
        with walk.at(len(blocks)):
            return torch.equal(logits_of(model, tokens), expected)
    except Exception:  # whatever a block raises that misses what earlier ones left
        return False


def _by_block(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[dict[str, nn.Module]]:
    """Yield the layers of each block, and last those of none."""
    rest = dict(layers)
    for block in named_blocks(model):
        yield {name: rest.pop(name) for name in list(rest) if name.startswith(f"{block}.")}
    yield rest


def _parts(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, nn.Module]]:
    part: dict[str, nn.Module] = {}
    size = 0
    for name, layer in layers.items():
        more = 4 * matrix(layer)[0].shape[1] ** 2
        if part and size + more > PRODUCTS:
            yield part
            part, size = {}, 0
        part[name] = layer
        size += more
    if part:
        yield part
