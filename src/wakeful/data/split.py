"""Split of documents into training and validation: never one text on both sides.

Documents are set down on disk as they are read, to be gone over again without their source: a
dataset is fetched once, files that change meanwhile change nothing, and no more than one document
is in memory.
"""

import contextlib
import hashlib
import json
import unicodedata
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wakeful.data.order import key64, mix64
from wakeful.data.readers import Document
from wakeful.errors import WakefulError

DIGEST = np.dtype([("low", "<u8"), ("high", "<u8")])


class Spool:
    """Documents in one file, a JSON line for each: name and text."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0  # of text, in UTF-8
        self._file = path.open("wb")
        self._corpus = hashlib.sha256()
        self._starts = array("q")
        self._lengths = array("q")
        self._digests = bytearray()
        self._normalized_digests = bytearray()

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def corpus_sha256(self) -> str:
        """Return the SHA-256 over every name and the SHA-256 of every text that was taken."""
        return self._corpus.hexdigest()

    @property
    def alike(self) -> np.ndarray:
        """Return 128 bits for each text: equal where two are, but for line ends, Unicode form and
        outer white space.
        """
        return np.frombuffer(bytes(self._normalized_digests), DIGEST)

    @property
    def digests(self) -> np.ndarray:
        """Return the first 128 bits of the SHA-256 of each text, or of the first that is alike."""
        _, first, which = np.unique(self.alike["low"], return_index=True, return_inverse=True)
        return np.frombuffer(bytes(self._digests), DIGEST)[first][which]

    @property
    def lengths(self) -> np.ndarray:
        """Return the bytes of each text in UTF-8."""
        return np.array(self._lengths, np.int64)

    def fill(self, documents: Iterable[Document], *, max_bytes: int | None = None) -> None:
        """Take `documents` until their texts are `max_bytes` of UTF-8, the last one cut short.

        Nothing can be added afterwards.
        """
        try:
            for document in documents:
                if self._add(document, max_bytes):
                    break
            self._file.flush()
        finally:
            with contextlib.suppress(OSError):  # a full disk is told of once
                self._file.close()

    def _add(self, document: Document, max_bytes: int | None) -> bool:
        """Take one document, and say whether `max_bytes` are there now.

        The digest is of the whole text even if it is cut. So a cut text goes to the same side as
        the whole one: else it could be trained on and validated on.
        """
        text = document.text.encode("utf-8")
        name = document.name.encode("utf-8", "surrogateescape")
        digest = hashlib.sha256(text).digest()
        room = len(text) + 1 if max_bytes is None else max_bytes - self.num_bytes
        full = len(text) >= room
        if full:  # not through a character
            text = text[:room].decode("utf-8", "ignore").encode("utf-8")
        if not text:
            return full
        self._starts.append(self._file.tell())
        self._lengths.append(len(text))
        # Both parts are of known length: no two different corpora feed the same bytes.
        self._corpus.update(len(name).to_bytes(8, "little") + name + digest)
        self._digests += digest[: DIGEST.itemsize]
        self._normalized_digests += hashlib.sha256(_normalize(document.text)).digest()[
            : DIGEST.itemsize
        ]
        line = json.dumps([document.name, text.decode()], ensure_ascii=False)
        self._file.write(line.encode("utf-8", "surrogatepass") + b"\n")
        self.num_bytes += len(text)
        return full

    def read(self, positions: np.ndarray) -> Iterator[Document]:
        """Return the documents where `positions` (a boolean for each) is true, in their order."""
        with self.path.open("rb") as file:
            for number in np.flatnonzero(positions):
                file.seek(self._starts[number])
                yield Document(*json.loads(file.readline()))

    def name(self, number: int) -> str:
        """Return the name of one document."""
        return next(self.read(np.arange(len(self)) == number)).name


def _normalize(text: str) -> bytes:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    return unicodedata.normalize("NFC", lines).encode("utf-8")


@dataclass(frozen=True)
class SplitSide:
    """The documents of one side: those of `spool` where `mask` is true."""

    spool: Spool
    mask: np.ndarray

    @property
    def num_bytes(self) -> int:
        """Return the bytes of text, in UTF-8."""
        return int(self.spool.lengths[self.mask].sum())


@dataclass(frozen=True)
class Split:
    """Both sides, and the rule that divides them."""

    train: SplitSide
    validation: SplitSide
    rule: str


def split_by_hash(spool: Spool, *, fraction: float, seed: int, scratch: Path) -> Split:
    """Give about `fraction` of the text to validation: whole documents, by a hash of each one's
    text, and the ends of documents that are too large for that.

    A document is cut near its end if it is alone, or a tenth of the text or more; where whole
    documents give less than half of the fraction or more than twice, so is one that is more than
    the fraction. A short text and one with a copy stay whole. Of the others a text's side depends
    on the text and `seed` alone, but for the departures of `held_out`: duplicates stay together
    (see `Spool.alike`), and more documents never move those before them.

    Raises:
        WakefulError: there is nothing to divide.
    """
    if len(spool) == 1:
        return _split_one(spool, fraction=fraction, scratch=scratch)
    sizes, digests = spool.lengths, spool.digests
    _, group, copies = np.unique(digests["low"], return_inverse=True, return_counts=True)
    divisible = (copies[group] == 1) & (sizes >= _SHORT)
    cut, validation, share = np.zeros(len(spool), bool), np.zeros(len(spool), bool), 0.0
    for limit in dict.fromkeys((max(_LARGE, fraction), fraction)):
        cut = divisible & (sizes >= limit * sizes.sum())
        ends = int(fraction * sizes[cut].sum())
        held = held_out(digests[~cut], sizes[~cut], fraction=fraction, seed=seed, ends=ends)
        if held is None and not cut.any():
            raise WakefulError(
                f"all {len(spool)} documents are the same text, so none is left for validation: "
                "pass a validation source"
            )
        validation = np.zeros(len(spool), bool)
        validation[~cut] = False if held is None else held
        share = (ends + sizes[validation].sum()) / sizes.sum()
        if fraction / 2 <= share <= 2 * fraction:
            break
    rule = f"SHA-256 of the text, seed {seed}, fraction {fraction}"
    if not cut.any():
        return Split(SplitSide(spool, ~validation), SplitSide(spool, validation), rule)
    parts, sides = Spool(scratch), list[bool]()
    parts.fill(_parts(spool, cut, validation, fraction, sides))
    held = np.array(sides, bool)
    rule = f"the ends of {cut.sum()} large documents; of the others, {rule}"
    return Split(SplitSide(parts, ~held), SplitSide(parts, held), rule)


_LARGE = 0.1
"""The share of the text from which on a document is cut."""
_SHORT = 1_000
"""Bytes; a document of fewer is not cut where there are others."""


def _parts(
    spool: Spool, cut: np.ndarray, validation: np.ndarray, fraction: float, sides: list[bool]
) -> Iterator[Document]:
    """Yield all documents, those that are `cut` in two; put into `sides` which are held out."""
    for number, document in enumerate(spool.read(np.ones(len(spool), bool))):
        end = _end(document.text, fraction) if cut[number] else len(document.text)
        tail = document.text[end:]
        sides.append(bool(validation[number]))
        yield Document(document.name, document.text[:end])
        if tail:
            sides.append(True)
            yield Document(document.name, tail)


def held_out(
    digests: np.ndarray, sizes: np.ndarray, *, fraction: float, seed: int, ends: int = 0
) -> np.ndarray | None:
    """Return a mask of the documents to validate on; None if all documents are equal.

    Each document's digest is hashed with the seed, and those with the lowest hashes are held out:
    all below `fraction` of the range, then fewer or more until their bytes, with `ends`, lie
    between half and twice `fraction` of the text. `ends` are the bytes already held out of
    documents cut in two; without any, at least one document is held out, and never all.
    """
    if not len(digests):
        return None
    document_hashes = mix64(digests["low"], key64("validation", seed))
    hashes, rank = np.unique(document_hashes, return_inverse=True)  # rank 0: the lowest hash
    if len(hashes) == 1:
        return None
    bytes_held_out = ends + np.concatenate([[0], np.bincount(rank, sizes).cumsum()])  # by count
    text_bytes = bytes_held_out[-1] - ends + ends / fraction
    lowest, highest = 0 if ends else 1, len(hashes) - 1
    count = min(max(int((hashes < np.uint64(fraction * 2**64)).sum()), lowest), highest)
    while count > lowest and bytes_held_out[count] > 2 * fraction * text_bytes:
        count -= 1
    while count < highest and bytes_held_out[count] < fraction / 2 * text_bytes:
        count += 1
    return rank < count


def split_from_source(spool: Spool, validation: Spool) -> Split:
    """Train on one source and validate on the other.

    Raises:
        WakefulError: a text is in both; a loss on it would be a loss on what was learned by
            heart.
    """
    training_keys, validation_keys = spool.alike, validation.alike
    shared = np.flatnonzero(np.isin(validation_keys["low"], training_keys["low"], kind="sort"))
    for number in shared:
        same = np.flatnonzero(training_keys == validation_keys[number])
        if len(same):
            raise WakefulError(
                f"validation overlaps training: {validation.name(int(number))!r} of the validation "
                f"source is the same text as {spool.name(int(same[0]))!r} of the training source: "
                "take it out of one of them"
            )
    both = (
        SplitSide(spool, np.ones(len(spool), bool)),
        SplitSide(validation, np.ones(len(validation), bool)),
    )
    return Split(*both, rule="a source of its own")


def _split_one(spool: Spool, *, fraction: float, scratch: Path) -> Split:
    document = next(spool.read(np.ones(1, bool)))
    end = _end(document.text, fraction)
    head, tail = document.text[:end], document.text[end:]
    if not head.strip() or not tail.strip():
        raise WakefulError(
            f"the one document {document.name!r} of {len(document.text)} characters is too short "
            "to keep a part for validation: pass more text or a validation source"
        )
    parts = Spool(scratch)
    parts.fill(Document(document.name, text) for text in (head, tail))
    rule = f"the end of the one document, from character {end}"
    return Split(
        SplitSide(parts, np.array([True, False])), SplitSide(parts, np.array([False, True])), rule
    )


def _end(text: str, fraction: float) -> int:
    """Return where a document's training part ends: at the end of a line, unless that would give
    validation more than twice its `fraction`.
    """
    end = round(len(text) * (1 - fraction))
    smallest = max(0, round(len(text) * (1 - 2 * fraction)))
    return text.rfind("\n", smallest, end) + 1 or end
