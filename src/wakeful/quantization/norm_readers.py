"""Layers that read a norm's output, where a division of inputs can go into the norm's scale; and
which read one tensor.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from wakeful.model.hooks import hooked
from wakeful.probes.running import first_target, logits_of
from wakeful.quantization.linear import QuantizedLinear

_TOKENS = 4
"""Tokens that are read to see it, past those of a relaxed prefix: a padding token may be zeros."""


@torch.no_grad()
def readers_of_norms(model: nn.Module) -> dict[str, list[str]]:
    """Return the linear layers that read each norm's very output, by the norms' names.

    A norm is a module with a scale of its own for each channel of its output. One whose output
    something else reads too (the residual stream after a post-norm, a router of experts) is left
    out: what is divided there would be missing elsewhere.
    """
    readers, expected = _read(model, ())

    def alone(norms: Collection[str]) -> bool:
        return torch.equal(_read(model, norms)[1], expected)

    return readers if alone(readers) else {name: readers[name] for name in readers if alone([name])}


def _read(model: nn.Module, larger: Collection[str]) -> tuple[dict[str, list[str]], Tensor]:
    """Return the readers of every norm, and the logits of a few tokens.

    Every other output channel of the norms in `larger` is doubled, and halved where a linear layer
    reads it: that changes no bit unless something else reads it.
    """
    outputs: dict[int, tuple[Tensor, str]] = {}
    readers_by_norm: dict[str, list[str]] = {}

    def leave(name: str, _args: tuple[Any, ...], output: object) -> object:
        if not isinstance(output, Tensor):
            return output
        output = output * _twos(output) if name in larger else output
        outputs[id(output)] = (output, name)  # kept, so that nothing else gets its id
        return output

    def read(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        _, norm = outputs.get(id(args[0]), (None, None)) if args else (None, None)
        if norm is None:
            return args
        readers_by_norm.setdefault(norm, []).append(name)
        return (args[0] / _twos(args[0]), *args[1:]) if norm in larger else args

    readers = _linear(model)
    norms = {
        name: module for name, module in model.named_modules()
        if name not in readers and getattr(getattr(module, "weight", None), "ndim", 0) == 1
    }  # fmt: skip
    with hooked(readers, before=read), hooked(norms, after=leave):
        return readers_by_norm, _few_logits(model)


@torch.no_grad()
def readers_of_tensors(model: nn.Module) -> list[list[str]]:
    """Return the linear layers by the tensor that they read, also one that is no norm's output."""
    readers: dict[int, tuple[Tensor, list[str]]] = {}

    def read(name: str, args: tuple[Any, ...]) -> None:
        if args:  # the tensor is kept, so that nothing else gets its id
            readers.setdefault(id(args[0]), (args[0], []))[1].append(name)

    with hooked(_linear(model), before=read):
        _few_logits(model)
    return [names for _, names in readers.values()]


def _linear(model: nn.Module) -> dict[str, nn.Module]:
    kinds = (nn.Linear, Conv1D, QuantizedLinear)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def _few_logits(model: nn.Module) -> Tensor:
    table = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    tokens = torch.arange(first_target(model) + _TOKENS, device=table.weight.device)
    return logits_of(model, tokens[None] % table.num_embeddings)


def _twos(x: Tensor) -> Tensor:
    """Return 1 and 2 in turns, a number a channel."""
    return torch.arange(x.shape[-1], device=x.device).remainder(2).add(1).to(x.dtype)
