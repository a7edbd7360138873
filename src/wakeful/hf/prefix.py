"""A prefix's keys and values for stock models of Transformers, in the cache that is their own."""

import copy
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from wakeful.errors import WakefulError
from wakeful.hf.cache import CACHE
from wakeful.model.prefix import prefix_ids


@torch.no_grad()
def prefix_cache(
    model: PreTrainedModel, tokens: Sequence[int], *, batch_size: int = 1
) -> DynamicCache:
    """Return a cache that holds the keys and values of `tokens`, for a batch of sequences.

        cache = prefix_cache(model, [tokenizer.bos_token_id])
        model(text, cache=copy.deepcopy(cache))  # past_key_values before Transformers 5.24

    Make it of the model in full precision, before it is quantized: these values are then not
    rounded, and no token of the text takes the place of the first (PrefixQuant, 2410.05265). The
    cache grows with what is read, so pass a copy each time. `generate` wants the prefix's tokens
    before those of the prompt, too; it does not compute them again.

    Raises:
        WakefulError: there are no tokens, or one that the model lacks, or it keeps no cache of this
            kind.
    """
    ids = prefix_ids(tokens, model.get_input_embeddings().weight)  # pyright: ignore[reportArgumentType]
    cache = model(input_ids=ids, use_cache=True).get(CACHE)
    if not isinstance(cache, DynamicCache):
        raise WakefulError(
            f"{type(model).__name__} keeps a {type(cache).__name__}, and a stored prefix is for "
            "models with a DynamicCache; `wakeful cure --prefix` writes other models"
        )
    cache = copy.deepcopy(cache)
    if batch_size > 1:
        cache.batch_repeat_interleave(batch_size)
    return cache
