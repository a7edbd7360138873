"""Decoders with a changed configuration that share the weights of an existing decoder."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wakeful.model.decoder import Decoder


def rebuild_decoder(
    decoder: Decoder, new: Mapping[str, Tensor] | None = None, **changes: Any
) -> Decoder:
    """Return a decoder with a changed configuration, which shares its weights with `decoder`.

    `changes` are fields of the configuration with their new values. `new` holds parameters by name
    that are added, or that replace those of `decoder`; they do not require gradients. Parameters
    that the new configuration does not have are left out.
    """
    state = decoder.state_dict(keep_vars=True)
    added = {
        name: nn.Parameter(tensor, requires_grad=False) for name, tensor in (new or {}).items()
    }
    with torch.device("meta"):  # without memory: all weights are assigned below
        result = Decoder(dataclasses.replace(decoder.config, **changes))
    names = result.state_dict().keys()
    shared = {name: _ordinary(tensor) for name, tensor in state.items() if name in names}
    for name, parameter in result.named_parameters():
        # Loading gives a tensor the `requires_grad` of the parameter that it replaces; the caller's
        # parameters, which are shared, must keep theirs.
        if name in shared:
            parameter.requires_grad_(shared[name].requires_grad)
    result.load_state_dict(shared | added, assign=True)
    if result.config.tied:  # assigning may have untied them
        result.head.weight = result.embed.weight
    return result.to(decoder.embed.weight.device).train(decoder.training)


def _ordinary(tensor: Tensor) -> Tensor:
    """Return a tensor as it is, but copied if it is an inference tensor, which cannot be a
    parameter outside of inference mode.
    """
    if not tensor.is_inference() or torch.is_inference_mode_enabled():
        return tensor
    return nn.Parameter(tensor.clone(), requires_grad=False)
