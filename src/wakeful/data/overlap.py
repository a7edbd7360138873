"""A validation set that training does not hold: held-out documents that are in both are dropped.

Held-out documents are chosen by a hash of their text, which keeps equal ones together but not
those that are nearly equal: half of the tables of the standard library's `encodings` are in each
other. A loss on them is a loss on memorized text.
"""

import numpy as np

from wakeful.data.order import key64, mix64
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
    """Rewrite the validation files, and what `data.info` says, without what overlaps training.

    A document overlaps where more than `ALLOWED` of its passages of `PASSAGE` tokens are in the
    training text word for word. The training tokens stay as they are. `num_bytes` are the UTF-8
    bytes of each validation document. `data.info` then has the facts of the split `validation`, and
    in `overlap` how many documents and tokens were dropped.

    Raises:
        WakefulError: nothing of validation is left, or it was given as a text of its own, which is
            then wrong.
    """
    validation = data.validation
    shares = repeated_shares(data.train, validation, length=PASSAGE)
    bad = shares > ALLOWED
    dropped = {"passage": PASSAGE, "documents": int(bad.sum()), "tokens": 0}
    data.info["overlap"] = dropped
    if not bad.any():
        return
    worst = int(shares.argmax())
    if data.info["validation_source"]:
        raise WakefulError(
            f"the training text overlaps validation: of {len(shares)} validation documents "
            f"{int(bad.sum())} partly occur in it, document {worst} with {shares[worst]:.0%} of "
            f"its passages of {PASSAGE} tokens; take them out of one of the two, {_CURE}"
        )
    if bad.all():
        raise NothingHeldOut(
            f"the training text overlaps validation: every held-out document partly occurs in it "
            f"({shares[worst]:.0%} of passages of {PASSAGE} tokens at the worst); pass a "
            f"validation text of its own, hold out more, {_CURE}"
        )
    starts = np.asarray(validation.documents)
    ends = np.append(starts[1:], validation.num_tokens)
    places = zip(starts[~bad], ends[~bad], strict=True)
    documents = (validation.tokens[start:end] for start, end in places)
    facts = write_split(data.folder, "validation", documents, int(num_bytes[~bad].sum()))
    dropped["tokens"] = validation.num_tokens - facts["tokens"]
    data.info["splits"]["validation"] = facts


_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers have inverses modulo 2^64
_CHUNK = 2**21
"""Places hashed at a time."""


def repeated_shares(train: TokenFile, validation: TokenFile, *, length: int) -> np.ndarray:
    """Return, for each validation document, the share of its passages that training holds verbatim.

    Passages are the document's windows of `length` tokens, side by side from its beginning;
    training is searched at every place. A document that is shorter has none, and a share of 0.
    Passages are known by the 64-bit polynomial hash Σ_k m(t_k) B^k, m a mixing of the token's id.
    """
    starts = np.asarray(validation.documents)
    lengths = np.diff(np.append(starts, validation.num_tokens))
    counts = lengths // length
    owner = np.repeat(np.arange(len(starts)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    repeated = np.zeros(len(owner), bool)
    if len(owner):
        places = (starts[owner] + number * length)[:, None] + np.arange(length)
        passages = _hashes(validation.tokens[places].ravel(), length)[::length]
        for start in range(0, train.num_tokens - length + 1, _CHUNK):
            stop = min(start + _CHUNK + length - 1, train.num_tokens)
            repeated |= np.isin(passages, _hashes(train.tokens[start:stop], length), kind="sort")
    return np.bincount(owner, repeated, len(starts)) / np.maximum(counts, 1)


def _hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the hash of the `length` tokens from each place on."""
    mixed = mix64(tokens.astype(np.uint64), key64("overlap"))
    count = len(tokens)
    powers = np.cumprod(np.concatenate([[np.uint64(1)], np.full(count - 1, _BASE)]))
    sums = np.concatenate([[np.uint64(0)], np.cumsum(mixed * powers)])
    inverse = np.uint64(pow(int(_BASE), -1, 2**64))
    back = np.cumprod(np.concatenate([[np.uint64(1)], np.full(count - length, inverse)]))
    return (sums[length:] - sums[:-length]) * back
