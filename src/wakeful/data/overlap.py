"""How much of a validation text stands word for word in the training text.

Documents that are equal are kept apart when text is prepared; this finds passages that are.
"""

import numpy as np

from wakeful.data.mixing import key64, mix64
from wakeful.data.tokens import TokenFile

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers have inverses modulo 2^64
_CHUNK = 2**21
"""Places hashed at a time."""


def repeated_shares(train: TokenFile, validation: TokenFile, *, length: int) -> np.ndarray:
    """Return, for each validation document, the share of its passages that training holds verbatim.

    Passages are the document's windows of `length` tokens, side by side from its beginning;
    training is searched at every place. A document that is shorter has none, and a share of 0.
    """
    starts = np.asarray(validation.documents)
    lengths = np.diff(np.append(starts, validation.num_tokens))
    counts = lengths // length
    owner = np.repeat(np.arange(len(starts)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = repeated(train, validation, starts[owner] + number * length, length=length)
    return np.bincount(owner, found, len(starts)) / np.maximum(counts, 1)


def repeated(
    train: TokenFile, validation: TokenFile, starts: np.ndarray, *, length: int
) -> np.ndarray:
    """Return which passages of `length` validation tokens, from `starts` on, training holds.

    A place is found by the polynomial hash Σ_k m(t_k) B^k modulo 2^64, m a mixing of the token's
    id, and then compared token by token.
    """
    found = np.zeros(len(starts), bool)
    if not len(starts) or train.num_tokens < length:
        return found
    passages = np.stack([validation.tokens[start : start + length] for start in starts])
    wanted, which = np.unique(_hashes(passages.reshape(-1), length)[::length], return_inverse=True)
    for start in range(0, train.num_tokens - length + 1, _CHUNK):
        stop = min(start + _CHUNK + length - 1, train.num_tokens)
        tokens = np.asarray(train.tokens[start:stop])
        hashes = _hashes(tokens, length)
        places = np.flatnonzero(np.isin(hashes, wanted))
        # One place of each hash: that two passages of the training text collide is let pass.
        seen, where = np.unique(hashes[places], return_index=True)
        for value, place in zip(seen, places[where], strict=True):
            here = tokens[place : place + length]
            for number in np.flatnonzero(which == np.searchsorted(wanted, value)):
                found[number] |= bool((passages[number] == here).all())
    return found


def _hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the hash of the `length` tokens from each place on."""
    mixed = mix64(tokens.astype(np.uint64), key64("overlap"))
    count = len(tokens)
    powers = np.cumprod(np.concatenate([[np.uint64(1)], np.full(count - 1, _BASE)]))
    sums = np.concatenate([[np.uint64(0)], np.cumsum(mixed * powers)])
    inverse = np.uint64(pow(int(_BASE), -1, 2**64))
    back = np.cumprod(np.concatenate([[np.uint64(1)], np.full(count - length, inverse)]))
    return (sums[length:] - sums[:-length]) * back
