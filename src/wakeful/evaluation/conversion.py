"""A model of Transformers as our decoder, once both give the same logits."""

import torch

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
    with torch.inference_mode():
        own, theirs = (logits_of(module, tokens).float() for module in (decoder, model.module))
    exact = decoder.embed.weight.dtype in (torch.float32, torch.float64)
    close = 1e-3 if exact else 5e-2
    if float((own - theirs).abs().max()) > close * float(theirs.abs().max()):
        raise WakefulError(
            f"our decoder with the configuration and weights of this "
            f"{type(model.module).__name__} gives other logits"
        )
    return decoder
