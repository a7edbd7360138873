"""`open_gates`: a gate on every head's output, which at first changes nothing."""

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.surgery.rebuild import rebuilt


def check_gates(decoder: Decoder) -> None:
    """Raise `WakefulError` where a model cannot have gates put in."""
    if decoder.config.route != "own":
        raise WakefulError(
            f"model.route = {decoder.config.route}: gates are put into models whose route is own"
        )


@torch.no_grad()
def open_gates(decoder: Decoder) -> Decoder:
    """Return a decoder with the route `output_gate` and the same logits, to the bit.

    Every gate is sigmoid(0) = ½, where it learns fastest, and the output projection twice what it
    was. All other weights are shared with `decoder`, which stays as it is.

    Raises:
        WakefulError: the model has a route already.
    """
    check_gates(decoder)
    config = decoder.config
    heads, width = config.shape.num_heads, config.width
    like = decoder.embed.weight
    new: dict[str, Tensor] = {}
    for layer in range(config.num_layers):
        new[f"route.gates.{layer}.weight"] = like.new_zeros(heads, width)
        new[f"route.gates.{layer}.bias"] = like.new_zeros(heads)
        out = f"blocks.{layer}.attention.out.weight"
        new[out] = 2 * decoder.get_parameter(out).detach()
    return rebuilt(decoder, new, route="output_gate")
