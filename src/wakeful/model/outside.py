"""Checks of variants from outside the package before they are trained.

A route that reads the next token wins every comparison, and one whose cache differs from its
forward pass generates with another model. No loss shows either fault.
"""

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.config.model import VARIANTS, ModelConfig
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.initialize import initialize
from wakeful.variants import external_names

_LENGTHS = (13, 8, 2, 1)
"""Lengths of the texts: a cache or a convolution may fail at odd lengths only."""
_CLOSE = 1e-4
"""Largest difference of logits, relative to the largest logit, that counts as rounding."""


@torch.no_grad()
def check_outside(config: ModelConfig) -> None:
    """Check that a model's variants from outside the package, if it has any, read no later token
    and give the same logits with a cache.

    This is tried in a narrow model with as many layers and heads, on a few short texts.

    Raises:
        WakefulError: a token changes the logits of earlier tokens, or logits with a cache differ
            from those without.
    """
    fields = [field for field in VARIANTS if external_names(getattr(config, field))]
    if not fields:
        return
    # Wide enough for variants that read the first dozen channels of the stream; the window so short
    # that local layers hide keys.
    head_width = max(8, 2 * (64 // config.num_heads))
    narrow = dataclasses.replace(
        config, vocab_size=64, max_length=max(_LENGTHS), width=head_width * config.num_heads,
        head_width=head_width, mlp_width=16, rotary_width=0, stored_prefix=0,
        window=min(config.window, 5),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        decoder = initialize(Decoder(narrow), 0).eval()
        for parameter in decoder.parameters():  # a variant whose parameters are 0 has no effect
            parameter.add_(0.1 * torch.randn_like(parameter))
    parts = " and ".join(f"model.{field} = {getattr(config, field)}" for field in fields)
    for length in _LENGTHS:
        tokens = torch.arange(length)[None] % narrow.vocab_size
        logits = decoder(tokens)
        for position in range(1, length):
            changed = tokens.clone()
            changed[0, position] = narrow.vocab_size - 1  # a token that `tokens` lack
            leaked = _difference(decoder(changed)[:, :position], logits[:, :position])
            if leaked is not None:
                raise WakefulError(
                    f"{parts}: token {position} of {length} changes the logits of those before it, "
                    f"by {leaked:.2g}: a part may read a token itself and those before it"
                )
        cache = decoder.new_cache(1, length)
        pieces = [decoder(piece, cache=cache) for piece in tokens.split(1, 1)]
        if (cached := _difference(torch.cat(pieces, 1), logits)) is not None:
            raise WakefulError(
                f"{parts}: token by token with a cache, {length} tokens have other logits than "
                f"together, {cached:.2g} apart: what a part reads of earlier tokens must be keys "
                "and values"
            )


def _difference(actual: Float[Tensor, "B L V"], expected: Float[Tensor, "B L V"]) -> float | None:
    """Return the largest difference of the logits; None if it is so small that rounding explains
    it.
    """
    largest = float((actual - expected).abs().max())
    return None if largest <= _CLOSE * float(expected.abs().max()) else largest
