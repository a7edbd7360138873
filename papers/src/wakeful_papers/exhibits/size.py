"""The size of a configuration: parameters, operations per token, memory."""

from collections import Counter
from dataclasses import dataclass
from functools import cache

import torch

from wakeful.config.model import ModelConfig
from wakeful.config.schema import Config
from wakeful.data.tasks import task_of
from wakeful.model.block import Block
from wakeful.model.decoder import Decoder
from wakeful.variants.roles import role_of

H100 = 0.4 * 989e12
"""Operations per second of one H100 in bfloat16, at two fifths of its peak."""
BYTES_PER_PARAMETER = 16
"""Bytes per parameter in training: weight, gradient and two moments in float32."""
BYTES_PER_WEIGHT = 4
"""Bytes per parameter in inference: float32."""


@dataclass(frozen=True)
class Size:
    """A model's parameters, and the operations and memory of its training."""

    parameters: int
    operations: float
    """Floating-point operations per token."""
    memory: int
    """Bytes."""


def run_size(config: Config) -> Size:
    """Return the parameters, operations per token and estimated memory of a configuration's
    training, without making its weights.
    """
    model, train, data = config.model, config.train, config.data
    task = task_of(data.source)
    if task is not None:
        model = model.with_vocabulary(len(task.characters) + 1)  # and BOS
    elif not data.tokenizer:  # a tokenizer with `data.vocab_size` tokens is trained
        model = model.with_vocabulary(data.vocab_size)
    parameters = parameters_of(model)
    sequences = train.micro_batch_size or train.batch_size
    bytes_per_number = 2 if train.dtype == "bfloat16" else 4
    # Activations for the backward pass: about 17 numbers per channel of a block, and the logits
    # twice in float32.
    blocks = model.num_layers * model.width * 17 * bytes_per_number
    activations = sequences * train.length * (blocks + 2 * 4 * model.vocab_size)
    memory = BYTES_PER_PARAMETER * parameters + activations
    return Size(parameters, operations_of(model, train.length), memory)


def tokens_of(config: Config) -> int:
    """Return the tokens that a run trains on."""
    return config.train.steps * config.train.batch_size * config.train.length


def parameters_of(model: ModelConfig) -> int:
    """Return the number of a model's parameters, without making its weights."""
    return _count_parameters(model)[0]


def operations_of(model: ModelConfig, length: int) -> float:
    """Return the floating-point operations of training a decoder on one token.

    They are 6 for each parameter of a matrix product, 2 forward and 4 backward. Causal attention
    adds 6 L H d per layer, with H heads of d channels and rows of L = `length` tokens: a query has
    L / 2 keys on average, each costs 2 H d in the logits and 2 H d in the output, and the backward
    pass costs twice the forward one. In a window of w tokens the mean is w (1 − w / 2 L) keys. What
    else a route, a norm or an optimizer computes is not counted. It is the arithmetic of
    docs/distributed.md.
    """
    shape = model.shape
    keys_per_query = 0.0  # the mean over queries, summed over layers
    for layer in range(model.num_layers):
        local = model.window if layer in model.local_layers else 0
        window = min(local or length, length)
        keys_per_query += window * (1 - window / (2 * length))
    attention = 12.0 * keys_per_query * shape.num_heads * shape.head_width
    return 6.0 * _count_parameters(model)[1] + attention


class _Sketch(Decoder):
    """A decoder for counting parameters: layers whose blocks have the same parts share one."""

    def __init__(self, config: ModelConfig) -> None:
        self.blocks_by_parts: dict[object, Block] = {}
        super().__init__(config)

    def _block(self, layer: int) -> Block:
        """Return a layer's block, or that of an earlier layer that has the same of the query, key
        and value projections itself and places its norms alike.
        """
        owned = tuple(self.plan.owns(kind, layer) for kind in ("query", "key", "value"))
        parts = (owned, self.placement.at(layer, self.config.num_layers))
        if parts not in self.blocks_by_parts:
            self.blocks_by_parts[parts] = super()._block(layer)
        return self.blocks_by_parts[parts]


@cache
def _count_parameters(model: ModelConfig) -> tuple[int, int]:
    """Return the number of all parameters, and without embeddings that are only looked up.

    The model is built on the meta device, where weights take no memory.
    """
    with torch.device("meta"):
        sketch = _Sketch(model)
    total = looked_up = 0
    for parameter in sketch.parameters():
        role = role_of(parameter)
        total += parameter.numel()
        if role is not None and role.embedding:
            looked_up += parameter.numel()
    # Equal layers share one block of the sketch, whose weights parameters() yields once.
    for block, num_layers in Counter(sketch.blocks).items():
        total += (num_layers - 1) * sum(weight.numel() for weight in block.parameters())
    if model.tied:  # the head multiplies by the embedding's table
        looked_up -= sketch.embed.weight.numel()
    return total, total - looked_up
