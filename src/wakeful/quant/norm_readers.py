"""Which layers read a norm's output: where a division of inputs can go into the norm's scale."""

from contextlib import ExitStack

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from wakeful.probes.running import logits_of
from wakeful.quant.linear import QuantizedLinear


@torch.no_grad()
def readers_of_norms(model: nn.Module) -> dict[str, list[str]]:
    """Return the linear layers that read each norm's very output, by the norms' names.

    A norm is a module with a scale of its own for each channel that it puts out. Two tokens are
    read to see it.
    """
    made: dict[int, tuple[Tensor, str]] = {}
    found: dict[str, list[str]] = {}

    def leave(name: str):
        def hook(_norm: nn.Module, _args: tuple, output: object) -> None:
            if isinstance(output, Tensor):
                made[id(output)] = (output, name)  # kept, so that nothing else gets its id

        return hook

    def read(name: str):
        def hook(_layer: nn.Module, args: tuple) -> None:
            _, norm = made.get(id(args[0]), (None, None)) if args else (None, None)
            if norm is not None:
                found.setdefault(norm, []).append(name)

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | Conv1D | QuantizedLinear):
                hooks.callback(module.register_forward_pre_hook(read(name)).remove)
            elif getattr(module, "weight", None) is not None and module.weight.ndim == 1:
                hooks.callback(module.register_forward_hook(leave(name)).remove)
        device = next(model.parameters()).device
        logits_of(model, torch.zeros(1, 2, dtype=torch.long, device=device))
    return found
