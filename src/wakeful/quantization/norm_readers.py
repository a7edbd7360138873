"""Linear layers by what they read: a norm's output, whose scale can take up a division of the
layers' inputs, or one shared tensor.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from wakeful.model.hooks import hooked
from wakeful.probes.running import logits_of
from wakeful.quantization.linear import QuantizedLinear

_TOKENS = 5
"""Tokens of the traced pass; one may be a padding token, all zeros."""


@torch.no_grad()
def readers_of_norms(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the linear layers that read each norm's output, by the norm's name.

    A norm is a module with one learned scale per channel. A norm whose output is read by something
    else too (the residual stream after a post-norm, a router of experts) is left out: if the
    norm's scale were divided, only linear layers could make up for it.
    """
    readers, expected = _trace_readers(model, ())

    def read_by_linears_only(norms: Collection[str]) -> bool:
        return torch.equal(_trace_readers(model, norms)[1], expected)

    if read_by_linears_only(readers):  # all at once saves a pass for each norm
        return readers
    return {name: readers[name] for name in readers if read_by_linears_only([name])}


def _trace_readers(
    model: nn.Module, doubled_norms: Collection[str]
) -> tuple[dict[str, list[str]], Tensor]:
    """Return the linear layers that read each norm's output, and the logits of a few tokens.

    Every other output channel of `doubled_norms` is doubled, and halved where a linear layer reads
    it: that changes no bit of the logits unless something else reads the output too.
    """
    norm_outputs: dict[int, tuple[Tensor, str]] = {}
    readers_by_norm: dict[str, list[str]] = {}

    def record_output(name: str, _args: tuple[Any, ...], output: object) -> object:
        if not isinstance(output, Tensor):
            return output
        if name in doubled_norms:
            output = output * _alternate_ones_and_twos(output)
        norm_outputs[id(output)] = (output, name)  # kept alive, so that its id stays unique
        return output

    def record_reader(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args or id(args[0]) not in norm_outputs:
            return args
        _, norm = norm_outputs[id(args[0])]
        readers_by_norm.setdefault(norm, []).append(name)
        if norm in doubled_norms:
            return args[0] / _alternate_ones_and_twos(args[0]), *args[1:]
        return args

    linears = _linear_modules(model)
    norms = {
        name: module for name, module in model.named_modules()
        if name not in linears and getattr(getattr(module, "weight", None), "ndim", 0) == 1
    }  # fmt: skip
    with hooked(linears, before=record_reader), hooked(norms, after=record_output):
        return readers_by_norm, _few_logits(model)


@torch.no_grad()
def readers_of_tensors(model: nn.Module) -> list[list[str]]:
    """Return the names of a model's linear layers, grouped by the input tensor that they share."""
    readers: dict[int, tuple[Tensor, list[str]]] = {}

    def record(name: str, args: tuple[Any, ...]) -> None:
        if args:  # the tensor is kept alive, so that its id stays unique
            _, names = readers.setdefault(id(args[0]), (args[0], []))
            names.append(name)

    with hooked(_linear_modules(model), before=record):
        _few_logits(model)
    return [names for _, names in readers.values()]


def _linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    kinds = (nn.Linear, Conv1D, QuantizedLinear)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def _few_logits(model: nn.Module) -> Tensor:
    """Return the logits of a few tokens with the ids 0, 1, 2 ..."""
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    tokens = torch.arange(_TOKENS, device=embedding.weight.device)
    return logits_of(model, tokens[None] % embedding.num_embeddings)


def _alternate_ones_and_twos(x: Tensor) -> Tensor:
    """Return 1, 2, 1, 2 ..., one number per channel of x."""
    return torch.arange(x.shape[-1], device=x.device).remainder(2).add(1).to(x.dtype)
