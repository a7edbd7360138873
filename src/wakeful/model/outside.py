"""Parts from outside the package, tried before they are trained.

A route that reads the next token wins every comparison, and one whose cache differs from its
forward is another model when it generates. Nothing in a loss shows either.
"""

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.config.model import VARIANTS, ModelConfig
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.initialize import initialize
from wakeful.variants import foreign_names

_LENGTHS = (13, 8, 2, 1)
"""Texts that are read: a cache and a convolution may fail at odd ones alone."""
_CLOSE = 1e-4
"""The largest difference of a logit, over the largest logit, that rounding explains."""


@torch.no_grad()
def check_outside(config: ModelConfig) -> None:
    """Try a model's parts from outside the package in a narrow model of as many layers and heads.

    Raises:
        WakefulError: with one of them, a token changes the logits of those before it, or logits
            differ with a cache.
    """
    named = [name for name, folder in VARIANTS.items() if foreign_names(getattr(config, name))]
    if not named:
        return
    # Wide enough for parts that read the first channels of the stream, a dozen or so.
    width = max(8, 2 * (64 // config.num_heads))
    narrow = dataclasses.replace(
        config, vocab_size=64, max_length=max(_LENGTHS), width=width * config.num_heads,
        head_width=width, mlp_width=16, rotary_width=0, relaxed_prefix=0, stored_prefix=0,
        window=min(config.window, 5),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        decoder = initialize(Decoder(narrow), 0).eval()
        for parameter in decoder.parameters():  # what begins at zero would hide what it does
            parameter.add_(0.1 * torch.randn_like(parameter))
    parts = " and ".join(f"model.{name} = {getattr(config, name)}" for name in named)
    for length in _LENGTHS:
        tokens = torch.arange(length)[None] % narrow.vocab_size
        whole = decoder(tokens)
        for place in range(1, length):
            other = tokens.clone()
            other[0, place] = narrow.vocab_size - 1
            if (before := _apart(decoder(other)[:, :place], whole[:, :place])) is not None:
                raise WakefulError(
                    f"{parts}: token {place} of {length} changes the logits of those before it, by "
                    f"{before:.2g}: a part may read a token itself and those before it"
                )
        cache = decoder.new_cache(1, length)
        pieces = [decoder(piece, cache=cache) for piece in tokens.split(1, 1)]
        if (cached := _apart(torch.cat(pieces, 1), whole)) is not None:
            raise WakefulError(
                f"{parts}: token by token with a cache, {length} tokens have other logits than "
                f"together, {cached:.2g} apart: what a part reads of earlier tokens must be keys "
                "and values"
            )


def _apart(found: Float[Tensor, "B L V"], wanted: Float[Tensor, "B L V"]) -> float | None:
    """Return the largest difference, if it is more than rounding."""
    apart = float((found - wanted).abs().max())
    return None if apart <= _CLOSE * float(wanted.abs().max()) else apart
