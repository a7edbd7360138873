"""A prefix's keys and values for Transformers' own models, in a `DynamicCache`."""

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

    Compute it with the model in full precision, before quantization: the cached values are then not
    rounded, and no later token becomes the attention sink (PrefixQuant, 2410.05265). A forward pass
    appends to the cache, so pass a copy each time. `generate` needs the prefix's tokens at the
    start of the prompt as well, and does not compute them again.

    Raises:
        WakefulError: `tokens` is empty or has an id without an embedding, or the model's cache is
            not a `DynamicCache`.
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
