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

    A norm is a module with one learned scale per channel. It is left out if something else reads
    its output too (the residual stream after a post-norm, a router of experts): nothing could make
    up for a division of its scale there.
    """
    readers_by_norm: dict[str, list[str]] = {}
    traced, expected = _trace_readers(model)
    for norm, readers in traced:
        if norm:
            readers_by_norm.setdefault(norm, []).extend(readers)

    def read_by_linears_only(norms: Collection[str]) -> bool:
        """Tell whether the logits stay if all but linear layers read other outputs of norms."""
        return torch.equal(_trace_readers(model, norms)[1], expected)

    if read_by_linears_only(readers_by_norm):  # all at once saves a pass for each norm
        return readers_by_norm
    return {name: names for name, names in readers_by_norm.items() if read_by_linears_only([name])}


@torch.no_grad()
def readers_of_tensors(model: nn.Module) -> list[list[str]]:
    """Return the names of a model's linear layers, grouped by the input tensor that they share."""
    return [readers for _, readers in _trace_readers(model)[0]]


def _trace_readers(
    model: nn.Module, doubled_norms: Collection[str] = ()
) -> tuple[list[tuple[str, list[str]]], Tensor]:
    """Run a model over a few tokens, with the ids 0, 1, 2 ..., and record what linear layers read.

    Return a list of pairs, one for each tensor that they read: the name of the norm that computes
    it ("" for none), and the names of the layers. Return the logits too.

    Every other output channel of `doubled_norms` is doubled, and halved where a linear layer reads
    it: that changes no bit of the logits unless something else reads the output too.
    """
    # By the id of a tensor: the tensor, kept alive so that its id stays unique, and a norm's name
    # or the readers' names.
    norm_outputs: dict[int, tuple[Tensor, str]] = {}
    readers: dict[int, tuple[Tensor, list[str]]] = {}

    def record_output(name: str, _args: tuple[Any, ...], output: object) -> object:
        """Remember a norm's output; a hook after the norm, which may double channels."""
        if not isinstance(output, Tensor):
            return output
        if name in doubled_norms:
            output = output * _alternate_ones_and_twos(output)
        norm_outputs[id(output)] = (output, name)
        return output

    def record_reader(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Remember the input of a linear layer; a hook before it, which halves what was doubled."""
        if not args:
            return args
        x = args[0]
        readers.setdefault(id(x), (x, []))[1].append(name)
        if norm_outputs.get(id(x), (x, ""))[1] in doubled_norms:
            return x / _alternate_ones_and_twos(x), *args[1:]
        return args

    modules = dict(model.named_modules())
    kinds = (nn.Linear, Conv1D, QuantizedLinear)
    linears = {name: module for name, module in modules.items() if isinstance(module, kinds)}
    norms = {
        name: module for name, module in modules.items()
        if name not in linears and getattr(getattr(module, "weight", None), "ndim", 0) == 1
    }  # fmt: skip
    embedding = next(module for module in modules.values() if isinstance(module, nn.Embedding))
    tokens = torch.arange(_TOKENS, device=embedding.weight.device) % embedding.num_embeddings
    with hooked(linears, before=record_reader), hooked(norms, after=record_output):
        logits = logits_of(model, tokens[None])
    readers_by_tensor = [
        (norm_outputs.get(tensor_id, (x, ""))[1], names)
        for tensor_id, (x, names) in readers.items()
    ]
    return readers_by_tensor, logits


def _alternate_ones_and_twos(x: Tensor) -> Tensor:
    """Return 1, 2, 1, 2 ..., one number per channel of x."""
    return torch.arange(x.shape[-1], device=x.device).remainder(2).add(1).to(x.dtype)
