"""Gradients of a loss by the projections of queries and keys."""

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.model.decoder import IGNORED, Decoder
from wakeful.probes.base import Frame, Means, RowKey


def query_key_gradients(decoder: Decoder, batches: Iterable[tuple[Tensor, Tensor]]) -> Frame:
    """Return `query_gradient` and `key_gradient` of each layer with such weights.

    ‖∂L/∂W‖_F of the mean loss L over all `batches` of inputs and targets, (B, L) each (When
    Attention Collapses, fig. 19), in nats per unit of weight. Parameters' `.grad` is not touched.

    Raises:
        WakefulError: there are no batches.
    """
    weights: dict[RowKey, torch.nn.Parameter] = {}
    for layer, block in enumerate(decoder.blocks):
        for metric, heads in (("query_gradient", block.attention.query),
                              ("key_gradient", block.attention.key)):  # fmt: skip
            for parameter in heads.parameters():
                if parameter.ndim == 2:
                    weights[RowKey(layer, None, "all", metric, "paper")] = parameter
    chosen = list(weights.values())
    sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in chosen]
    device, count = decoder.head.weight.device, 0
    with torch.enable_grad(), contextlib.ExitStack() as restore:
        for weight in chosen:  # those too of a model that was loaded to be looked at
            restore.callback(weight.requires_grad_, weight.requires_grad)
            weight.requires_grad_(True)
        for inputs, targets in batches:
            loss = decoder.loss(inputs.to(device), targets.to(device), reduction="sum")
            for total, gradient in zip(sums, torch.autograd.grad(loss, chosen), strict=True):
                total.add_(gradient)
            count += int((targets != IGNORED).sum())
    if not count:
        raise WakefulError("gradients need at least one target")
    means = Means()
    for key, total in zip(weights, sums, strict=True):
        means.add(key, float(torch.linalg.vector_norm(total / count)))
    return means.rows()
