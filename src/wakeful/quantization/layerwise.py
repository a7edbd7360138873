"""Block-by-block passes: every block of a model reads all of a text before the next block does.

The products XᵀX of all layers' inputs may not fit memory, and a pass over the whole model for each
few layers would take as many passes as there are blocks. So every sequence goes through one block,
and its output is stored until the next block's turn.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from wakeful.probes.running import blocks_of, logits_of, named_blocks
from wakeful.quantization.linear import weight_and_bias

PRODUCTS = 2**28
"""Bytes that the products XᵀX may take at a time; one layer's may take more."""
_PROBE_TOKENS = 8
"""Tokens by which it is checked that every block reads only the output of the block before."""


class StopForward(Exception):
    """Raised inside a model's forward pass to end it after the block whose turn it is."""


def layers_by_block(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    text: Sequence[Tensor],
    *,
    rerun_blocks: bool = False,
) -> Iterator[dict[str, nn.Module]]:
    """Yield groups of layers, block by block, whose XᵀX fit into `PRODUCTS` bytes together.

    Between two yields the caller runs the model over all of `text`, in order. Such a pass computes
    one block only, from the stored outputs of the block before, and ends with `StopForward`. If the
    model's blocks do not form a chain, or all layers are one group, passes are ordinary ones.

    With `rerun_blocks` every group lies within one block, and a block is run again once the caller
    has replaced its layers, so that later blocks read the outputs of the new layers.
    """
    several_groups = rerun_blocks or not products_fit_memory(layers)
    blockwise = several_groups and _can_run_blockwise(model, text[0][:, :_PROBE_TOKENS])
    layers_of_blocks = [layers]
    if blockwise or rerun_blocks:
        layers_of_blocks = list(_group_by_block(model, layers))
    if not blockwise:
        for block_layers in layers_of_blocks:
            yield from _split_by_memory(block_layers)
        return
    runner = _BlockRunner(list(blocks_of(model)), len(text))
    for index, block_layers in enumerate(layers_of_blocks):
        with runner.run_only(index):
            yield from _split_by_memory(block_layers)
            # The next block needs this one's outputs: run it again with its new layers. A block
            # without layers to yield has not run yet: run it now.
            is_block = index < len(runner.blocks)  # the last entry is of layers outside the blocks
            if is_block and (rerun_blocks or not block_layers):
                runner.run(model, text)
        runner.advance()


def layers_from_block_on(
    model: nn.Module, layers: Mapping[str, nn.Module], text: Sequence[Tensor]
) -> Iterator[list[str]]:
    """Yield the names of each block's layers, and at last those of layers outside the blocks.

    Between two yields the caller runs the model over all of `text`, in order. Such a pass starts at
    the block whose names were yielded, from stored outputs of the block before. If the model's
    blocks do not form a chain, and for layers outside the blocks, passes are ordinary ones.
    """
    if not _can_run_blockwise(model, text[0][:, :_PROBE_TOKENS]):
        yield list(layers)
        return
    runner = _BlockRunner(list(blocks_of(model)), len(text))
    for index, block_layers in enumerate(_group_by_block(model, layers)):
        if index == len(runner.blocks):  # those outside the blocks
            yield list(block_layers)
            return
        with runner.run_from(index):
            yield list(block_layers)
        with runner.run_only(index):  # once more, for the inputs of the next block
            runner.run(model, text)
        runner.advance()


def products_fit_memory(layers: Mapping[str, nn.Module]) -> bool:
    """Tell whether the XᵀX of all layers' inputs fit into `PRODUCTS` bytes together."""
    return len(list(_split_by_memory(layers))) <= 1


class _BlockRunner:
    """Runs single blocks of a model from stored outputs of the block before.

    `inputs` holds the current block's input for each sequence of the text and `outputs` what it
    computed; `sequence` is the index of the sequence that the model is reading.
    """

    def __init__(self, blocks: Sequence[nn.Module], num_sequences: int) -> None:
        self.blocks = blocks
        self.inputs: list[Any] = [None] * num_sequences
        self.outputs: list[Any] = [None] * num_sequences
        self.sequence = -1

    def run_only(self, index: int) -> AbstractContextManager[None]:
        """Make the model's passes end after the block `index`, without computing earlier ones."""
        return self._replace_forwards(self.blocks, index)

    def run_from(self, index: int) -> AbstractContextManager[None]:
        """Make the model's passes start at the block `index`, without computing earlier ones."""
        return self._replace_forwards(self.blocks[:index], index)

    @contextmanager
    def _replace_forwards(self, blocks: Sequence[nn.Module], current: int) -> Iterator[None]:
        """Within the context, replace the forward of each of `blocks`, the model's first ones, by
        the replacement that `_step` returns for it; passes then compute the block with the index
        `current`.
        """
        # An instance has its own forward only if a library, such as accelerate, has set it.
        own_forwards = {block: vars(block).get("forward") for block in blocks}
        try:
            for block_index, block in enumerate(blocks):
                block.forward = self._step(block_index, current, block.forward)
            yield
        finally:
            for block, own_forward in own_forwards.items():
                del block.forward  # now the method of the class is found again
                if own_forward is not None:
                    block.forward = own_forward

    def advance(self) -> None:
        """Use the outputs of the current block as the inputs of the next."""
        self.inputs, self.outputs = self.outputs, [None] * len(self.inputs)

    def _step(
        self, block_index: int, current: int, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a replacement for `forward`, that of the block with the index `block_index`, in
        passes that compute the block with the index `current`.

        An earlier block returns the stored input of the current block; the current block stores its
        output and ends the pass by `StopForward`. The first block also sets `sequence` to that of
        the pass.
        """

        def step(*args: Any, **kwargs: Any) -> Any:
            if block_index == 0:  # a pass begins: it reads the next sequence
                self.sequence = (self.sequence + 1) % len(self.inputs)
            if block_index < current:
                return self.inputs[self.sequence]
            self.outputs[self.sequence] = forward(*args, **kwargs)
            raise StopForward

        return step

    @torch.no_grad()
    def run(self, model: nn.Module, text: Sequence[Tensor]) -> None:
        """Run the model over all sequences of the text, each until the end or `StopForward`."""
        for tokens in text:
            with suppress(StopForward):
                logits_of(model, tokens)


@torch.no_grad()
def _can_run_blockwise(model: nn.Module, tokens: Tensor) -> bool:
    """Tell whether a model can be run block by block and then has the same logits for `tokens`."""
    blocks = list(blocks_of(model))
    runner = _BlockRunner(blocks, 1)
    expected = logits_of(model, tokens)
    try:
        for index in range(len(blocks)):
            with runner.run_only(index):
                runner.run(model, [tokens])
            runner.advance()
        # Now every block returns the last one's output, and only what follows it is computed.
        with runner.run_only(len(blocks)):
            return torch.equal(logits_of(model, tokens), expected)
    except Exception:  # a block may raise anything if it misses what earlier blocks computed
        return False


def _group_by_block(
    model: nn.Module, layers: Mapping[str, nn.Module]
) -> Iterator[dict[str, nn.Module]]:
    """Yield the layers of each block, and at last those outside the blocks."""
    remaining = dict(layers)
    for block in named_blocks(model):
        names = [name for name in remaining if name.startswith(f"{block}.")]
        yield {name: remaining.pop(name) for name in names}
    yield remaining


def _split_by_memory(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, nn.Module]]:
    """Yield the layers in groups whose XᵀX (float32) take at most `PRODUCTS` bytes together."""
    group: dict[str, nn.Module] = {}
    group_bytes = 0
    for name, layer in layers.items():
        layer_bytes = 4 * weight_and_bias(layer)[0].shape[1] ** 2
        if group and group_bytes + layer_bytes > PRODUCTS:
            yield group
            group, group_bytes = {}, 0
        group[name] = layer
        group_bytes += layer_bytes
    if group:
        yield group
