"""`store_prefix`: tokens whose keys and values precede every sequence, computed once.

The first token of a sequence collects attention and has outliers. If BOS, or tokens that a model
prefers for it, are stored ahead of the text as keys and values in full precision, no token of the
text takes that role: the outliers never occur in quantized activations
(PrefixQuant, 2410.05265; CushionCache, 2406.12016). No weight changes, and the function is the
model's own on texts that begin with these tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.prefix import prefix_ids
from wakeful.model.rebuild import rebuild_decoder


def check_stores(decoder: Decoder, num_tokens: int) -> None:
    """Raise `WakefulError` if the model has a stored prefix already, or cannot have one of
    `num_tokens` tokens.
    """
    config = decoder.config
    if config.stored_prefix:
        raise WakefulError(
            f"the model has a stored prefix of {config.stored_prefix} tokens already: cure the "
            "model that it was made of"
        )
    if num_tokens:
        replace(config, stored_prefix=num_tokens)  # a config checks itself when it is made


@torch.no_grad()
def store_prefix(decoder: Decoder, tokens: Sequence[int]) -> Decoder:
    """Return a decoder that reads every sequence as if these tokens stood before it: their keys and
    values, computed once, are stored in it.

    It shares its weights with `decoder`, which is not changed. In layers with a window every token
    sees the prefix, however far back it is. So the logits are those of `decoder` after these tokens
    as long as the prefix is within the window; beyond that they differ.

    Raises:
        WakefulError: there are no tokens or more than the context holds, an id is not in the
            vocabulary, or the model has a stored prefix already.
    """
    check_stores(decoder, len(tokens))
    ids = prefix_ids(tokens, decoder.embed.weight)
    cache = decoder.new_cache(1, len(tokens))
    decoder.hidden(ids, cache=cache)  # fills the cache with the tokens' keys and values
    stored = {
        f"blocks.{layer}.attention.stored.{kind}": cache.read((kind, layer))[0].clone()
        for kind, layer in decoder.cache_slots
    }
    return rebuild_decoder(decoder, stored, stored_prefix=len(tokens))
