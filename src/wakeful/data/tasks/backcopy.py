"""Bigrams and copies: a task that makes a small Transformer grow attention sinks in minutes."""

import hashlib
from functools import cached_property

import numpy as np

from wakeful.data.sources import PYTHON_STDLIB, read_documents
from wakeful.data.tasks.base import BOS_ID, Task
from wakeful.data.tokens import open_prepared
from wakeful.errors import WakefulError

_MOST_CHARACTERS = 2048
"""In a table, which has an entry for each pair of them."""
_CODES = 0x110000
"""Of Unicode."""
_BITS = 40
"""Of a random number that decides on a token; probabilities are multiples of 2⁻⁴⁰."""


class Backcopy(Task):
    """Bigrams of characters, and after a trigger a copy of the character before it.

    The bigram-backcopy task of Guo et al. 2024 (arXiv 2410.13835, section 2): z₀ is BOS, and
    z_{t+1} = z_{t−1} where z_t is one of the `triggers`, the most frequent characters, else drawn
    from P(· | z_t), the frequencies of pairs in a text. z₁ is drawn from the frequencies of the
    characters that are not triggers, because a trigger there had nothing before it to copy; so no
    trigger ever follows another, and BOS does not come back.

    The head that copies is needed at triggers alone. `text` is a file, a folder or a folder of
    prepared tokens; without it the table is that of the standard library. Of its characters the
    `alphabet` most frequent are in the table, and the rest are taken out before pairs are counted.
    """

    examples = ("backcopy", "backcopy(triggers=1)", "backcopy(alphabet=32)")

    def __init__(self, *, triggers: int = 3, alphabet: int = 96, text: str = "") -> None:
        if triggers < 0:
            raise WakefulError(f"backcopy: triggers = {triggers} must not be negative")
        if not triggers < alphabet <= _MOST_CHARACTERS:
            raise WakefulError(
                f"backcopy: alphabet = {alphabet} must be more than triggers = {triggers}, because "
                f"what copies needs something to copy, and at most {_MOST_CHARACTERS}"
            )
        self.triggers = triggers
        self.alphabet = alphabet
        self.text = text

    @property
    def characters(self) -> str:
        return self._table[0]

    @property
    def counts(self) -> np.ndarray:
        """Counts of each character after each other, (V, V) int64 in the order of `characters`.

        Every document is closed to a circle, so each character has as many followers as
        forerunners, and its frequency is the stationary one.
        """
        return self._table[1]

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256(b"backcopy")
        for data in (b"%d" % self.triggers, self.characters.encode(), self.counts.tobytes()):
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()

    @cached_property
    def trigger_ids(self) -> np.ndarray:
        """The ids of the triggers, the most frequent first; of equal ones the first character."""
        order = np.argsort(-self.counts.sum(1), kind="stable")
        return 1 + order[: self.triggers]

    @cached_property
    def probabilities(self) -> np.ndarray:
        """The table P, (V + 1, V + 1) float64: each row is of the id before, BOS's first.

        Each is a multiple of 2⁻⁴⁰, exactly the probability with which `draw` takes the token.
        """
        return np.diff(self._bounds, prepend=0, axis=1) / 2**_BITS

    def draw(self, numbers: np.ndarray) -> np.ndarray:
        bits = (numbers.T >> np.uint64(64 - _BITS)).astype(np.int64)
        windows = np.full(bits.shape, BOS_ID, np.int64)  # a row a position
        (ends, tokens), copies = self._pairs, self._copies
        for position in range(1, len(windows)):
            last = windows[position - 1]
            characters = tokens[
                np.searchsorted(ends, (last << _BITS) + bits[position], side="right")
            ]
            windows[position] = np.where(copies[last], windows[max(position - 2, 0)], characters)
        return np.ascontiguousarray(windows.T)

    def losses(self, rows: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):  # what cannot follow has an infinite loss
            sampled = -np.log(self.probabilities[rows[:, :-1], rows[:, 1:]])
            before = np.concatenate([rows[:, :1], rows[:, :-2]], axis=1)  # the first's is itself
            copied = -np.log((rows[:, 1:] == before).astype(float))
        return np.where(self.is_trigger(rows[:, :-1]), copied, sampled) + 0.0

    def entropies(self, rows: np.ndarray) -> np.ndarray:
        """Return the entropy in nats of the token after each of `rows` (n, L), given those up to
        it, (n, L): what `losses` is in expectation over the next token.
        """
        p = self.probabilities
        entropy = -(p * np.log(np.where(p > 0, p, 1.0))).sum(1)
        return np.where(self.is_trigger(rows), 0.0, entropy[rows])

    def is_trigger(self, rows: np.ndarray) -> np.ndarray:
        return self._copies[rows]

    @cached_property
    def _copies(self) -> np.ndarray:
        """Return True for each id that is a trigger."""
        return np.isin(np.arange(len(self.characters) + 1), self.trigger_ids)

    @cached_property
    def _bounds(self) -> np.ndarray:
        """Σ_{k ≤ j} P(k | i) · 2⁴⁰, rounded down, at (i, j)."""
        size = len(self.characters) + 1
        pairs = np.zeros((size, size))
        pairs[1:, 1:] = self.counts
        pairs[BOS_ID, 1:] = np.where(self._copies[1:], 0, self.counts.sum(1))
        sums = np.cumsum(pairs, axis=1)
        return np.floor(sums / sums[:, -1:] * 2**_BITS).astype(np.int64)

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Upper bounds of the (row, token) pairs that occur, in one ascending array, and each
        pair's token.

        Row r's bounds are offset by r · 2⁴⁰.
        """
        before, tokens = np.nonzero(np.diff(self._bounds, prepend=0, axis=1))
        return self._bounds[before, tokens] + (before << _BITS), tokens

    @cached_property
    def _table(self) -> tuple[str, np.ndarray]:
        texts = _texts(self.text)
        codes = [np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.int64) for text in texts]
        often = np.zeros(_CODES, np.int64)
        for text_codes in codes:
            occurrences = np.bincount(text_codes)
            often[: len(occurrences)] += occurrences
        in_alphabet = np.zeros(_CODES, bool)
        in_alphabet[np.argsort(-often, kind="stable")[: self.alphabet]] = True
        in_alphabet &= often > 0
        chosen = np.flatnonzero(in_alphabet)
        if len(chosen) <= self.triggers:
            raise WakefulError(
                f"backcopy: the text {self.text or PYTHON_STDLIB} has {len(chosen)} characters, "
                f"and triggers = {self.triggers} must be fewer: what copies needs something to copy"
            )
        index_of = np.cumsum(in_alphabet) - 1
        size = len(chosen)
        counts = np.zeros(size**2, np.int64)
        for text_codes in codes:
            first = index_of[text_codes[in_alphabet[text_codes]]]
            counts += np.bincount(first * size + np.roll(first, -1), minlength=len(counts))
        return "".join(map(chr, chosen)), counts.reshape(size, size)


def _texts(source: str) -> list[str]:
    data = open_prepared(source) if source else None
    if data is None:
        return [document.text for document in read_documents(source or PYTHON_STDLIB)]
    train, tokenizer = data.train, data.tokenizer
    parts = np.split(np.asarray(train.tokens), train.documents[1:])
    return [text for part in parts if (text := tokenizer.decode(part.tolist()))]
