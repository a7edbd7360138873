"""`store_prefix`: tokens whose keys and values stand before every sequence, computed once.

The first token of a sequence is where attention parks and where outliers stand. Where BOS, or the
tokens that a model likes best for it, stand there already as stored keys and values in full
precision, no token of the text takes that place: its outliers never occur in what is quantized
(PrefixQuant, 2410.05265; CushionCache, 2406.12016). No weight changes, and the function is the
model's own on texts that begin with these tokens.
"""

import math
import sys
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.hooks import hooked
from wakeful.model.rebuild import rebuilt
from wakeful.world import ALONE, World


@torch.no_grad()
def store_prefix(decoder: Decoder, tokens: Sequence[int]) -> Decoder:
    """Return a decoder that reads every sequence as if these tokens stood before it.

    It shares its weights with `decoder`, which stays as it is.

    Raises:
        WakefulError: no tokens, ids past the vocabulary, more than the context holds, or a model
            that has a stored prefix already.
    """
    config = decoder.config
    if config.stored_prefix:
        raise WakefulError(
            f"the model has a stored prefix of {config.stored_prefix} tokens already"
        )
    ids = prefix_ids(tokens, decoder.embed.weight)
    cache = decoder.new_cache(1, len(tokens))
    decoder.hidden(ids, cache=cache)
    stored = {
        f"blocks.{layer}.attention.stored.{kind}": cache.read((kind, layer))[0].clone()
        for kind, layer in decoder.cache_slots
    }
    return rebuilt(decoder, stored, stored_prefix=len(tokens))


def prefix_ids(tokens: Sequence[int], table: Tensor) -> Int[Tensor, "1 P"]:
    """Return the tokens of a prefix as one sequence, where the embedding `table` lies.

    Raises:
        WakefulError: there are none, or one is past the vocabulary.
    """
    if not tokens:
        raise WakefulError("a prefix needs at least one token")
    wrong = [token for token in tokens if not 0 <= token < len(table)]
    if wrong:
        raise WakefulError(f"token {wrong[0]} is not in the vocabulary of {len(table)}")
    return torch.tensor([list(tokens)], device=table.device)


@torch.no_grad()
def choose_prefix(
    decoder: Decoder,
    text: Int[Tensor, "B L"],
    candidates: Sequence[int],
    *,
    num_tokens: int = 1,
    world: World = ALONE,
) -> list[int]:
    """Return the tokens that, stored, leave the text without outliers, one added at a time.

    Each is the candidate with the least mean over blocks of log max |x|, x the block's output over
    the whole text. The processes share the candidates.
    """
    chosen: list[int] = []
    tokens = [*dict.fromkeys(candidates)]
    for _ in range(num_tokens):
        heights = [
            _height(store_prefix(decoder, [*chosen, token]), text)
            for token in tokens[world.part(len(tokens))]
        ]
        of_all = world.whole(torch.tensor(heights, dtype=torch.float64), len(tokens))
        chosen.append(tokens[int(of_all.argmin())])
    return chosen


def _height(decoder: Decoder, text: Tensor) -> float:
    """Return the mean over blocks of log max |x|."""
    found: list[float] = []

    def see(_layer: int, _args: tuple, output: tuple) -> None:
        found.append(math.log(max(float(output[0].abs().max()), sys.float_info.min)))

    with hooked(dict(enumerate(decoder.blocks)), after=see):
        decoder.hidden(text)
    return sum(found) / len(found)
