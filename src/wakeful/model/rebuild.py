"""A decoder of another description around the weights of one that exists."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wakeful.model.decoder import Decoder


def rebuilt(decoder: Decoder, new: Mapping[str, Tensor] | None = None, **changes: Any) -> Decoder:
    """Return a decoder whose configuration has `changes`; it shares weights with `decoder`.

    `new` are parameters that the changed one has besides, or in the place of the old ones; those
    that it lacks are left out.
    """
    state = decoder.state_dict(keep_vars=True)
    given = {
        name: nn.Parameter(tensor, requires_grad=False) for name, tensor in (new or {}).items()
    }
    with torch.device("meta"):
        made = Decoder(dataclasses.replace(decoder.config, **changes))
    known = made.state_dict().keys()
    kept = {name: _ordinary(tensor) for name, tensor in state.items() if name in known}
    for name, parameter in made.named_parameters():
        if name in kept:  # or loading would thaw a frozen one, which is the caller's too
            parameter.requires_grad_(kept[name].requires_grad)
    made.load_state_dict(kept | given, assign=True)
    if made.config.tied:
        made.head.weight = made.embed.weight
    return made.to(decoder.embed.weight.device).train(decoder.training)


def _ordinary(tensor: Tensor) -> Tensor:
    """Return a tensor, or a copy of one that was made in inference mode, which no parameter of
    another mode can be.
    """
    if not tensor.is_inference() or torch.is_inference_mode_enabled():
        return tensor
    return nn.Parameter(tensor.clone(), requires_grad=False)
