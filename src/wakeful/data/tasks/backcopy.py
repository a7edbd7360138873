"""Bigrams and copies: a task that makes a small Transformer grow attention sinks in minutes."""

import functools
import hashlib
from functools import cached_property

import numpy as np
import tokenizers
from tokenizers import decoders, models

from wakeful.data.sources import PYTHON_STDLIB, TASK, read_documents
from wakeful.data.tokenizer import Tokenizer
from wakeful.data.tokens import open_prepared
from wakeful.errors import WakefulError
from wakeful.variants import Variant, build

BOS_TOKEN = "<bos>"
BOS_ID = 0
_MOST_CHARACTERS = 2048
"""Largest alphabet: the table of probabilities has an entry for each pair of characters."""
_CODES = 0x110000
"""Number of Unicode code points."""
_BITS = 40
"""Bits of a random number that choose a token; probabilities are multiples of 2⁻⁴⁰."""


class Backcopy(Variant):
    """Bigrams of characters, and after a trigger a copy of the character before it.

    The bigram-backcopy task of Guo et al. 2024 (arXiv 2410.13835, section 2): z₀ is BOS, and
    z_{t+1} = z_{t−1} where z_t is one of the `triggers`, the most frequent characters, else drawn
    from P(· | z_t), the frequencies of pairs in a text. z₁ is drawn from the frequencies of the
    characters that are not triggers, because a trigger there had nothing before it to copy; so no
    trigger ever follows another, and BOS does not come back.

    Tokens are ids of the `characters`, counted from 1, after BOS, 0. The head that copies is needed
    at triggers alone. `text` is a file, a folder or a folder of
    prepared tokens; without it the table is that of the standard library. Of its characters the
    `alphabet` most frequent are in the table, and the rest are taken out before pairs are counted.
    """

    examples = ("backcopy", "backcopy(triggers=1)", "backcopy(alphabet=32)")

    def __init__(self, *, triggers: int = 3, alphabet: int = 96, text: str = "") -> None:
        """Define the task by the number of triggers, the number of characters and the text from
        which pair frequencies are taken ("": the standard library).
        """
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
        """The vocabulary; the id of a character is its place, counted from 1."""
        return self._table[0]

    @property
    def counts(self) -> np.ndarray:
        """Counts of pairs: entry (i, j) says how often character j follows character i, (V, V)
        int64 in the order of `characters`.

        Every document's last character is followed by its first. So each character has as many
        successors as predecessors, and its frequency is that of the stationary distribution.
        """
        return self._table[1]

    @property
    def sha256(self) -> str:
        """Hash of what the probabilities depend on: triggers, characters and counts of pairs."""
        digest = hashlib.sha256(b"backcopy")
        # With the length before each part, no two tasks feed the same bytes.
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
        """The table P(j | i), (V + 1, V + 1) float64, by the ids i and j; BOS has id 0.

        Entries are multiples of 2⁻⁴⁰, exactly the probabilities with which `draw_windows` draws.
        """
        return np.diff(self._bounds, prepend=0, axis=1) / 2**_BITS

    def draw_windows(self, numbers: np.ndarray) -> np.ndarray:
        """Draw windows, (n, L) int64, from random `numbers`, (n, L) uint64: after a trigger the
        character before it, otherwise a character drawn from the pair frequencies.
        """
        bits = (numbers.T >> np.uint64(64 - _BITS)).astype(np.int64)  # the upper 40, (L, n)
        windows = np.full(bits.shape, BOS_ID, np.int64)  # (L, n)
        bounds, next_tokens = self._pairs
        for position in range(1, len(windows)):
            last = windows[position - 1]
            # Draw pairs (last token, next token), by number: last token i searches from i · 2⁴⁰.
            pairs = np.searchsorted(bounds, (last << _BITS) + bits[position], side="right")
            # Not used at position 1, where the last token, BOS, is no trigger.
            before_last = windows[max(position - 2, 0)]
            windows[position] = np.where(self._is_trigger_id[last], before_last, next_tokens[pairs])
        return np.ascontiguousarray(windows.T)

    def losses(self, rows: np.ndarray) -> np.ndarray:
        """Return −ln p of each token of `rows` (n, L + 1) except the first: (n, L), in nats. It is
        infinite for a token that cannot follow.
        """
        with np.errstate(divide="ignore"):
            drawn = -np.log(self.probabilities[rows[:, :-1], rows[:, 1:]])
            # The token two positions earlier; of the second token, the first.
            two_earlier = np.concatenate([rows[:, :1], rows[:, :-2]], axis=1)
            copied = -np.log((rows[:, 1:] == two_earlier).astype(float))
        # + 0.0 makes 0 of the −0 of a certain token.
        return np.where(self.is_trigger(rows[:, :-1]), copied, drawn) + 0.0

    def is_trigger(self, rows: np.ndarray) -> np.ndarray:
        """Return a mask, of the shape of `rows`, of the triggers."""
        return self._is_trigger_id[rows]

    def tokenizer(self) -> Tokenizer:
        """Return a tokenizer whose tokens are single characters; it drops unknown characters."""
        ids = {BOS_TOKEN: BOS_ID} | {
            character: i for i, character in enumerate(self.characters, start=1)
        }
        inner = tokenizers.Tokenizer(models.BPE(ids, []))
        inner.decoder = decoders.Fuse()
        return Tokenizer(inner, end_of_text=BOS_TOKEN).with_bos()

    @cached_property
    def _is_trigger_id(self) -> np.ndarray:
        """A mask over all ids, (V + 1,), of those that are triggers."""
        return np.isin(np.arange(len(self.characters) + 1), self.trigger_ids)

    @cached_property
    def _bounds(self) -> np.ndarray:
        """Cumulative probabilities Σ_{k ≤ j} P(k | i) · 2⁴⁰, rounded down, at (i, j): int64
        (V + 1, V + 1).

        After BOS (i = 0) a character that is no trigger is drawn by its frequency.
        """
        size = len(self.characters) + 1
        pair_counts = np.zeros((size, size))
        pair_counts[1:, 1:] = self.counts
        pair_counts[BOS_ID, 1:] = np.where(self._is_trigger_id[1:], 0, self.counts.sum(1))
        sums = np.cumsum(pair_counts, axis=1)
        return np.floor(sums / sums[:, -1:] * 2**_BITS).astype(np.int64)

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The pairs (last token, next token) that occur: their cumulative probabilities in one
        ascending array, and their next tokens.

        The probabilities of last token i are offset by i · 2⁴⁰, so that one binary search over the
        array finds the next token for any last token.
        """
        last, tokens = np.nonzero(np.diff(self._bounds, prepend=0, axis=1))
        return self._bounds[last, tokens] + (last << _BITS), tokens

    @cached_property
    def _table(self) -> tuple[str, np.ndarray]:
        """The alphabet, in the order of Unicode, and the counts of its pairs in the text."""
        texts = _read_texts(self.text)
        codes = [np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.int64) for text in texts]
        frequencies = np.zeros(_CODES, np.int64)
        for text_codes in codes:
            occurrences = np.bincount(text_codes)
            frequencies[: len(occurrences)] += occurrences
        in_alphabet = np.zeros(_CODES, bool)
        in_alphabet[np.argsort(-frequencies, kind="stable")[: self.alphabet]] = True
        in_alphabet &= frequencies > 0
        alphabet_codes = np.flatnonzero(in_alphabet)
        if len(alphabet_codes) <= self.triggers:
            raise WakefulError(
                f"backcopy: the text {self.text or PYTHON_STDLIB} has {len(alphabet_codes)} "
                f"characters, and triggers = {self.triggers} must be fewer: what copies needs "
                "something to copy"
            )
        index_of = np.cumsum(in_alphabet) - 1  # a character's number in the alphabet, by its code
        num_characters = len(alphabet_codes)
        counts = np.zeros(num_characters**2, np.int64)
        for text_codes in codes:
            characters = index_of[text_codes[in_alphabet[text_codes]]]
            followers = np.roll(characters, -1)  # the first follows the last
            pairs = characters * num_characters + followers
            counts += np.bincount(pairs, minlength=len(counts))
        return "".join(map(chr, alphabet_codes)), counts.reshape(num_characters, num_characters)


def _read_texts(source: str) -> list[str]:
    """Return the texts of a source's documents; "" is the standard library. Of prepared tokens, the
    training documents are decoded.
    """
    data = open_prepared(source) if source else None
    if data is None:
        return [document.text for document in read_documents(source or PYTHON_STDLIB)]
    train, tokenizer = data.train, data.tokenizer
    parts = np.split(np.asarray(train.tokens), train.documents[1:])
    return [text for part in parts if (text := tokenizer.decode(part.tolist()))]


def task_of(source: str) -> Backcopy | None:
    """Return the task that a source such as "backcopy" or "backcopy(triggers=2)" names; None for a
    source of text.
    """
    return _build_task(source) if source.partition("(")[0].strip() == TASK else None


@functools.cache
def _build_task(source: str) -> Backcopy:
    return build("data.tasks", source)
