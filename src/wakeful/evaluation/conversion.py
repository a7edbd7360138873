"""A model of Transformers as our decoder, once both give the same logits."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from wakeful.errors import WakefulError
from wakeful.loading.model import Model
from wakeful.model.decoder import Decoder
from wakeful.probes.running import logits_of

_COMPARED = 32
"""Tokens on which both must agree."""


def decoder_alike(model: Model) -> Decoder:
    """Return a model of Transformers as our decoder, which shares its weights.

    A class of the user's own may carry a known configuration and compute something else.

    Raises:
        WakefulError: our decoder cannot be it, or gives other logits.
    """
    decoder = model.decoder()
    length = min(_COMPARED, model.context)
    tokens = (torch.arange(length, device=model.device) * 7919 % decoder.config.vocab_size)[None]
    with torch.inference_mode(), _in_float32(decoder, model.module):
        own, theirs = (logits_of(module, tokens).float() for module in (decoder, model.module))
    if float((own - theirs).abs().max()) > 1e-3 * float(theirs.abs().max()):
        raise WakefulError(
            f"our decoder with the configuration and weights of this "
            f"{type(model.module).__name__} gives other logits"
        )
    return decoder


@contextlib.contextmanager
def _in_float32(*modules: nn.Module) -> Iterator[None]:
    """Widen shorter parameters for a while; what two programs round in 16 bits differs too much to
    compare: by a tenth of the logits' spread in SmolLM2, whose activations reach 24,000.
    """
    parameters = {id(p): p for module in modules for p in module.parameters()}
    kept = [
        (p, p.data) for p in parameters.values() if p.is_floating_point() and p.element_size() < 4
    ]
    try:
        for parameter, data in kept:
            parameter.data = data.float()
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
