"""A block's layers rounded together, so that what the block puts out stays what it was."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from wakeful.model.hooks import hooked
from wakeful.probes.huggingface import stream_of
from wakeful.probes.running import named_blocks
from wakeful.quant.experts import put
from wakeful.quant.linear import QuantizedLinear, matrix
from wakeful.quant.schemes import Scales, Scheme
from wakeful.quant.schemes.autoround import AutoRound, Rounding
from wakeful.quant.walking import Turn, turns
from wakeful.quant.weighing import token_weights

Rounded = tuple[Tensor, Scales]
"""Codes and their scales."""


@torch.inference_mode(False)
def fit_blocks(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    scheme: Scheme,
    text: Sequence[Tensor],
    make: Callable[[str, Rounded | None], QuantizedLinear],
) -> None:
    """Make the quantized forms of those layers that lie in blocks, and leave them in the model.

    Blocks are fitted in order by `AutoRound`, each to what it gave in full precision on `text`,
    token ids (B, L). `make` gives a layer's form by its name and codes, or rounded to nearest.

    Raises:
        WakefulError: a block reads more than what the one before it gave.
    """
    method = scheme.method
    assert isinstance(method, AutoRound)
    heard = token_weights(model, named_blocks(model), text) if method.weighs_tokens else None
    for turn in turns(model, text):
        inside = [name for name in layers if name.startswith(f"{turn.name}.")]
        weights = None
        if heard is not None:
            weights = [each.get(0, torch.zeros(())) for each in heard[turn.name]]
        nearest = {name: make(name, None) for name in inside}
        rounded = _fitted(turn, {name: layers[name] for name in inside}, nearest, method, weights)
        put(model, {name: make(name, each) for name, each in rounded.items()})


def _fitted(
    turn: Turn,
    layers: Mapping[str, nn.Module],
    nearest: Mapping[str, QuantizedLinear],
    method: AutoRound,
    weights: Sequence[Tensor] | None,
) -> dict[str, Rounded]:
    """Return the codes and scales of a block's layers that give the least error of its output.

    `nearest` are the layers rounded to nearest, which say on what grids numbers lie; `weights` are
    those of each sequence's tokens, (B · L,).
    """
    found = {
        name: Rounding(matrix(layers[name])[0], each.grid.under(each.outer))
        for name, each in nearest.items()
    }
    turned = {name for name, layer in layers.items() if isinstance(layer, Conv1D)}
    generator = torch.Generator().manual_seed(0)
    least, kept = float("inf"), {name: each.rounded() for name, each in found.items()}

    def lay(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        return x + (nearest[name].rounded_inputs(x.detach()) - x).detach(), *rest

    with hooked(layers, before=lay), torch.enable_grad():
        for step in range(method.steps if layers else 0):
            laid = {name: each.laid() for name, each in found.items()}
            leaves = {name: each.detach().requires_grad_() for name, each in laid.items()}
            matrices = {
                f"{name.removeprefix(turn.name)[1:]}.weight":
                    (each.T if name in turned else each).to(matrix(layers[name])[0].dtype)
                for name, each in leaves.items()
            }  # fmt: skip
            chosen = torch.randperm(len(turn.calls), generator=generator)[: method.batch].tolist()
            total, sums = 0.0, [torch.zeros_like(each) for each in leaves.values()]
            for number in chosen:
                args, kwargs = turn.calls[number]
                y = stream_of(functional_call(turn.block, matrices, args, kwargs))
                error = (y - turn.wanted[number]).float().square().mean(-1).flatten()
                loss = (error if weights is None else error * weights[number]).mean()
                total += float(loss.detach())
                # An expert may have read no token of a sequence.
                slopes = torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True)
                torch._foreach_add_(sums, list(slopes))
            if total < least:  # of other sequences at each step, as in the authors' code
                least, kept = total, {name: each.rounded() for name, each in found.items()}
            by = (1 - step / method.steps) / method.steps
            for each, y, gradient in zip(found.values(), laid.values(), sums, strict=True):
                each.move(torch.autograd.grad(y, each.learned, gradient), by)
    return kept
