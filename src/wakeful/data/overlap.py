"""A validation set that training does not hold: held-out documents that are in both are dropped.

Held-out documents are chosen by a hash of their text, which keeps equal ones together but not
those that are nearly equal: half of the tables of the standard library's `encodings` are in each
other. A loss on them is a loss on memorized text.
"""

import numpy as np

from wakeful.data.order import derive_key, mix64
from wakeful.data.tokens import PreparedData, TokenFile, write_split
from wakeful.errors import WakefulError

PASSAGE = 64
"""Tokens of a passage: longer than a license's name, shorter than a function."""
ALLOWED = 0.05
"""Share of a document's passages that may occur in the training text: a license's, say."""
_CURE = "or keep such documents (data.keep_overlap)"


class NothingHeldOut(WakefulError):
    """Every held-out document occurs in the training text."""


def drop_overlap(data: PreparedData, num_bytes: np.ndarray) -> None:
    """Drop validation documents that overlap the training text: rewrite the validation files.

    A document overlaps if more than `ALLOWED` of its passages of `PASSAGE` tokens occur verbatim in
    the training text. `num_bytes` has the UTF-8 bytes of each validation document. `data.info` is
    changed in place: the facts of the split `validation` are updated, and `overlap` says how many
    documents and tokens were dropped.

    Raises:
        NothingHeldOut: every validation document overlaps.
        WakefulError: a document overlaps, and the user supplied the validation text.
    """
    validation = data.validation
    shares = measure_overlap(data.train, validation, length=PASSAGE)
    overlaps = shares > ALLOWED
    dropped = {"passage": PASSAGE, "documents": int(overlaps.sum()), "tokens": 0}
    data.info["overlap"] = dropped
    if not overlaps.any():
        return
    worst = int(shares.argmax())
    if data.info["validation_source"]:
        raise WakefulError(
            f"the training text overlaps validation: of {len(shares)} validation documents "
            f"{int(overlaps.sum())} partly occur in it, document {worst} with {shares[worst]:.0%} "
            f"of its passages of {PASSAGE} tokens; take them out of one of the two, {_CURE}"
        )
    if overlaps.all():
        raise NothingHeldOut(
            f"the training text overlaps validation: every held-out document partly occurs in it "
            f"({shares[worst]:.0%} of passages of {PASSAGE} tokens at the worst); pass a "
            f"validation text of its own, hold out more, {_CURE}"
        )
    starts = np.asarray(validation.documents)
    ends = np.append(starts[1:], validation.num_tokens)
    remaining = zip(starts[~overlaps], ends[~overlaps], strict=True)
    documents = (validation.tokens[start:end] for start, end in remaining)
    facts = write_split(data.folder, "validation", documents, int(num_bytes[~overlaps].sum()))
    dropped["tokens"] = validation.num_tokens - facts["tokens"]
    data.info["splits"]["validation"] = facts


_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers have inverses modulo 2^64
_CHUNK = 2**21
"""Positions hashed at a time."""


def measure_overlap(train: TokenFile, validation: TokenFile, *, length: int) -> np.ndarray:
    """Return, for each validation document, the share of its passages that occur verbatim in the
    training text: float64 (documents,).

    A document's passages are consecutive windows of `length` tokens from its beginning. A shorter
    document has no passage, and a share of 0. The training text is searched at every position.
    Passages are compared by the 64-bit polynomial hash Σ_k m(t_k) B^k, where m mixes the bits of a
    token's id.
    """
    starts = np.asarray(validation.documents)
    document_lengths = np.diff(np.append(starts, validation.num_tokens))
    counts = document_lengths // length  # passages of each document
    num_passages = int(counts.sum())
    document_ids = np.repeat(np.arange(len(starts)), counts)  # of each passage
    # The number of each passage within its document, from 0.
    numbers = np.arange(num_passages) - np.repeat(np.cumsum(counts) - counts, counts)
    is_repeated = np.zeros(num_passages, bool)
    if num_passages:
        positions = (starts[document_ids] + numbers * length)[:, None] + np.arange(length)
        # Hashes of all windows of the joined passages, of which every `length`-th is a passage.
        passage_hashes = _hash_windows(validation.tokens[positions].ravel(), length)[::length]
        for start in range(0, train.num_tokens - length + 1, _CHUNK):
            stop = min(start + _CHUNK + length - 1, train.num_tokens)
            train_hashes = _hash_windows(train.tokens[start:stop], length)
            is_repeated |= np.isin(passage_hashes, train_hashes, kind="sort")
    return np.bincount(document_ids, is_repeated, len(starts)) / np.maximum(counts, 1)


def _hash_windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return a polynomial hash of every window of `length` tokens, one per start: uint64.

    Window i is hashed as Σ_k m(t_{i+k}) B^k mod 2⁶⁴, the difference of two prefix sums of
    m(t_j) B^j, times B^{-i}; m is `mix64`.
    """
    mixed = mix64(tokens.astype(np.uint64), derive_key("overlap"))
    powers = _powers(_BASE, len(tokens))
    sums = np.concatenate([[np.uint64(0)], np.cumsum(mixed * powers)])
    inverse = np.uint64(pow(int(_BASE), -1, 2**64))
    inverse_powers = _powers(inverse, len(tokens) - length + 1)
    return (sums[length:] - sums[:-length]) * inverse_powers


def _powers(base: np.uint64, count: int) -> np.ndarray:
    """Return base⁰, base¹, …, `count` powers modulo 2⁶⁴: uint64."""
    return np.cumprod(np.concatenate([[np.uint64(1)], np.full(count - 1, base)]))
