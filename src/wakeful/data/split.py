"""Which documents are for training and which for validation: never one text on both sides.

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
        self._alike = bytearray()

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
        return np.frombuffer(bytes(self._alike), DIGEST)

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

        The digest is that of the whole text even where it is cut: its beginning must not be
        trained on either where the whole is for validation.
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
        self._alike += hashlib.sha256(_core(document.text)).digest()[: DIGEST.itemsize]
        line = json.dumps([document.name, text.decode()], ensure_ascii=False)
        self._file.write(line.encode("utf-8", "surrogatepass") + b"\n")
        self.num_bytes += len(text)
        return full

    def read(self, wanted: np.ndarray) -> Iterator[Document]:
        """Return the documents where `wanted` (a boolean for each) is true, in their order."""
        with self.path.open("rb") as file:
            for number in np.flatnonzero(wanted):
                file.seek(self._starts[number])
                yield Document(*json.loads(file.readline()))

    def name(self, number: int) -> str:
        """Return the name of one document."""
        return next(self.read(np.arange(len(self)) == number)).name


def _core(text: str) -> bytes:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    return unicodedata.normalize("NFC", lines).encode("utf-8")


@dataclass(frozen=True)
class Side:
    """The documents of one side: those of `spool` where `wanted` is true."""

    spool: Spool
    wanted: np.ndarray

    @property
    def num_bytes(self) -> int:
        """Return the bytes of text, in UTF-8."""
        return int(self.spool.lengths[self.wanted].sum())


@dataclass(frozen=True)
class Split:
    """Both sides, and the rule that divides them."""

    train: Side
    validation: Side
    rule: str


def split_by_hash(spool: Spool, *, fraction: float, seed: int, scratch: Path) -> Split:
    """Give about `fraction` of the documents to validation, by a hash of each one's text.

    A text's side depends on the text and `seed` alone: duplicates stay together (see
    `Spool.alike`), and more documents never move those before them. Two departures keep both
    sides filled: the text with the extreme hash goes over to an empty side, and a source of one
    document is cut in two near its end.

    Raises:
        WakefulError: there is nothing to divide.
    """
    if len(spool) == 1:
        return _split_one(spool, fraction=fraction, scratch=scratch)
    validation = held_out(spool.digests, fraction=fraction, seed=seed)
    if validation is None:
        raise WakefulError(
            f"all {len(spool)} documents are the same text, so none is left for validation: "
            "pass a validation source"
        )
    rule = f"SHA-256 of the text, seed {seed}, fraction {fraction}"
    return Split(Side(spool, ~validation), Side(spool, validation), rule)


def held_out(digests: np.ndarray, *, fraction: float, seed: int) -> np.ndarray | None:
    """Return which documents are for validation, by their digests alone; None if all are alike."""
    values = mix64(digests["low"], key64("validation", seed))
    if values.min() == values.max():
        return None
    validation = values < np.uint64(fraction * 2**64)
    if not validation.any():
        return values == values.min()
    return values != values.max() if validation.all() else validation


def split_from_source(spool: Spool, validation: Spool) -> Split:
    """Train on one source and validate on the other.

    Raises:
        WakefulError: a text stands in both; a loss on it would be a loss on what was learned by
            heart.
    """
    ours, theirs = spool.alike, validation.alike
    shared = np.flatnonzero(np.isin(theirs["low"], ours["low"], kind="sort"))
    for number in shared:
        same = np.flatnonzero(ours == theirs[number])
        if len(same):
            raise WakefulError(
                f"validation overlaps training: {validation.name(int(number))!r} of the validation "
                f"source is the same text as {spool.name(int(same[0]))!r} of the training source: "
                "take it out of one of them"
            )
    both = Side(spool, np.ones(len(spool), bool)), Side(validation, np.ones(len(validation), bool))
    return Split(*both, rule="a source of its own")


def _split_one(spool: Spool, *, fraction: float, scratch: Path) -> Split:
    document = next(spool.read(np.ones(1, bool)))
    length = len(document.text)
    wanted = round(length * (1 - fraction))
    # At the end of a line, unless that would give validation more than twice what it is to have.
    least = max(0, round(length * (1 - 2 * fraction)))
    end = document.text.rfind("\n", least, wanted) + 1 or wanted
    head, tail = document.text[:end], document.text[end:]
    if not head.strip() or not tail.strip():
        raise WakefulError(
            f"the one document {document.name!r} of {length} characters is too short "
            "to keep a part for validation: pass more text or a validation source"
        )
    parts = Spool(scratch)
    parts.fill(Document(document.name, text) for text in (head, tail))
    rule = f"the end of the one document, from character {end}"
    return Split(Side(parts, np.array([True, False])), Side(parts, np.array([False, True])), rule)
