"""Split of documents into training and validation: never one text on both sides.

Documents are first copied into a temporary file, which is then read several times. So a dataset is
fetched once, files that change meanwhile have no effect, and one document at a time is in memory.
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

from wakeful.data.order import derive_key, mix64
from wakeful.data.readers import Document
from wakeful.errors import WakefulError

DIGEST = np.dtype([("low", "<u8"), ("high", "<u8")])


class Spool:
    """Documents in one temporary file, each as a JSON line [name, text], with their hashes."""

    def __init__(self, path: Path) -> None:
        """Create an empty file at `path`; `fill` writes the documents."""
        self.path = path
        self.num_bytes = 0  # of text, in UTF-8
        self._file = path.open("wb")
        self._corpus = hashlib.sha256()  # of the names and texts of all documents
        # For each document: where its line begins in the file, the bytes of its text, the first
        # bytes of the text's SHA-256, and those of the normalized text's.
        self._starts = array("q")
        self._lengths = array("q")
        self._digests = bytearray()
        self._normalized_digests = bytearray()

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def corpus_sha256(self) -> str:
        """SHA-256 of the names of all documents and the SHA-256 sums of their texts."""
        return self._corpus.hexdigest()

    @property
    def normalized_digests(self) -> np.ndarray:
        """A 128-bit hash of each text, (documents,) DIGEST, equal for texts that differ only in
        line ends, Unicode form and outer white space.
        """
        return np.frombuffer(bytes(self._normalized_digests), DIGEST)

    @property
    def digests(self) -> np.ndarray:
        """A 128-bit hash of each text, (documents,) DIGEST: the start of its SHA-256.

        Texts that differ only in line ends, Unicode form and outer white space all have the hash of
        the first of them.
        """
        _, first_indices, group_ids = np.unique(
            self.normalized_digests["low"], return_index=True, return_inverse=True
        )
        return np.frombuffer(bytes(self._digests), DIGEST)[first_indices][group_ids]

    @property
    def lengths(self) -> np.ndarray:
        """Size of each text in UTF-8 bytes, (documents,) int64."""
        return np.array(self._lengths, np.int64)

    def fill(self, documents: Iterable[Document], *, max_bytes: int | None = None) -> None:
        """Write documents until their texts have `max_bytes` of UTF-8; the last one is cut there.

        The file is then closed, and nothing can be added.
        """
        try:
            for document in documents:
                if self._add(document, max_bytes):
                    break
            self._file.flush()
        finally:
            with contextlib.suppress(OSError):  # a full disk has raised its error above
                self._file.close()

    def _add(self, document: Document, max_bytes: int | None) -> bool:
        """Write one document; return True where the file then has `max_bytes` of text.

        Hashes are those of the whole text even if it is cut. So a cut text goes to the same side of
        the split as a whole copy of it; otherwise training and validation could share it.
        """
        text = document.text.encode("utf-8")
        name = document.name.encode("utf-8", "surrogateescape")
        digest = hashlib.sha256(text).digest()
        # Without a limit there is always room for more than this text.
        bytes_left = len(text) + 1 if max_bytes is None else max_bytes - self.num_bytes
        is_full = len(text) >= bytes_left
        if is_full:  # "ignore" drops a character that the cut goes through
            text = text[:bytes_left].decode("utf-8", "ignore").encode("utf-8")
        if not text:  # an empty document, or no room for its first character
            return is_full
        self._starts.append(self._file.tell())
        self._lengths.append(len(text))
        # The digest's length is fixed and the name's comes first: no two corpora feed equal bytes.
        self._corpus.update(len(name).to_bytes(8, "little") + name + digest)
        self._digests += digest[: DIGEST.itemsize]
        self._normalized_digests += hashlib.sha256(_normalize_text(document.text)).digest()[
            : DIGEST.itemsize
        ]
        line = json.dumps([document.name, text.decode()], ensure_ascii=False)
        self._file.write(line.encode("utf-8", "surrogatepass") + b"\n")
        self.num_bytes += len(text)
        return is_full

    def read(self, mask: np.ndarray) -> Iterator[Document]:
        """Yield the documents where `mask`, (documents,) bool, is true, in their order."""
        with self.path.open("rb") as file:
            for number in np.flatnonzero(mask):
                file.seek(self._starts[number])
                yield Document(*json.loads(file.readline()))

    def name(self, number: int) -> str:
        """Return the name of one document."""
        return next(self.read(np.arange(len(self)) == number)).name


def _normalize_text(text: str) -> bytes:
    """Return a text with "\\n" as line end, in NFC and without outer white space, as UTF-8."""
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
    """Training and validation documents, and a description of the rule that divides them."""

    train: SplitSide
    validation: SplitSide
    rule: str


def split_by_hash(spool: Spool, *, fraction: float, seed: int, scratch: Path) -> Split:
    """Split the documents of `spool`, a temporary file, so that about `fraction` of the text is for
    validation: whole documents, chosen by a hash of their text, and the ends of large documents.

    A document is large if it is a tenth of the text or more, or the only one. If validation then
    gets less than half or more than twice `fraction`, a document that is larger than `fraction` of
    the text counts as large too. Texts shorter than `_SHORT` bytes and texts with a copy are never
    cut, unless there is only one. The side of a whole document depends only on its text and `seed`
    (see `choose_held_out` for exceptions), so that copies stay together
    (`Spool.normalized_digests`) and further documents do not move earlier ones. If a document is
    cut, all are written again, as parts, to a new file at `scratch`.

    Raises:
        WakefulError: all documents are the same text, or the only one is too short.
    """
    if len(spool) == 1:
        _check_can_be_cut(next(spool.read(np.ones(1, bool))), fraction)
    sizes, digests = spool.lengths, spool.digests
    _, group_ids, group_sizes = np.unique(digests["low"], return_inverse=True, return_counts=True)
    has_no_copy = group_sizes[group_ids] == 1
    can_be_cut = has_no_copy & ((sizes >= _SHORT) | (len(spool) == 1))
    is_cut = is_validation = np.zeros(len(spool), bool)  # (documents,), set by the loop
    # First cut few documents; if that misses the fraction, cut more. Equal limits are tried once.
    for limit in dict.fromkeys((max(_LARGE, fraction), fraction)):
        is_cut = can_be_cut & (sizes >= limit * sizes.sum())
        end_bytes = int(fraction * sizes[is_cut].sum())
        is_held_out = choose_held_out(
            digests[~is_cut], sizes[~is_cut], fraction=fraction, seed=seed, end_bytes=end_bytes
        )
        if is_held_out is None and not is_cut.any():
            raise WakefulError(
                f"all {len(spool)} documents are the same text, so none is left for validation: "
                "pass a validation source"
            )
        is_validation = np.zeros(len(spool), bool)
        if is_held_out is not None:
            is_validation[~is_cut] = is_held_out
        share = (end_bytes + sizes[is_validation].sum()) / sizes.sum()
        if fraction / 2 <= share <= 2 * fraction:
            break
    rule = f"SHA-256 of the text, seed {seed}, fraction {fraction}"
    if not is_cut.any():
        return Split(SplitSide(spool, ~is_validation), SplitSide(spool, is_validation), rule)
    parts, part_is_validation = Spool(scratch), list[bool]()
    parts.fill(_cut_documents(spool, is_cut, is_validation, fraction, part_is_validation))
    mask = np.array(part_is_validation, bool)
    rule = f"the ends of {is_cut.sum()} large documents; of the others, {rule}"
    return Split(SplitSide(parts, ~mask), SplitSide(parts, mask), rule)


_LARGE = 0.1
"""The share of the text from which on a document is cut."""
_SHORT = 1_000
"""Bytes; a document of fewer is not cut where there are others."""


def _cut_documents(
    spool: Spool,
    is_cut: np.ndarray,
    is_validation: np.ndarray,
    fraction: float,
    part_is_validation: list[bool],
) -> Iterator[Document]:
    """Yield all documents of `spool`; those marked in `is_cut` come as two parts, training text and
    validation text.

    For each part that is yielded, append to `part_is_validation` whether it is for validation.
    """
    for number, document in enumerate(spool.read(np.ones(len(spool), bool))):
        end = _training_end(document.text, fraction) if is_cut[number] else len(document.text)
        tail = document.text[end:]
        part_is_validation.append(bool(is_validation[number]))
        yield Document(document.name, document.text[:end])
        if tail:
            part_is_validation.append(True)
            yield Document(document.name, tail)


def choose_held_out(
    digests: np.ndarray, sizes: np.ndarray, *, fraction: float, seed: int, end_bytes: int = 0
) -> np.ndarray | None:
    """Choose validation documents by hash; return a mask, or None if there are no two different
    documents.

    Each document's digest is hashed with the seed, and the documents with the lowest hashes are
    held out: all below `fraction` · 2⁶⁴, then fewer or more until their bytes lie between half
    and twice `fraction` of the text. `end_bytes` counts the bytes that are held out already:
    the ends of documents that are cut in two. If it is 0, at least one document is held out. At
    least one document always stays for training.
    """
    if not len(digests):
        return None
    document_hashes = mix64(digests["low"], derive_key("validation", seed))
    hashes, rank = np.unique(document_hashes, return_inverse=True)  # rank 0: the lowest hash
    if len(hashes) == 1:
        return None
    # Entry n: the bytes held out with the n lowest hashes.
    bytes_held_out = end_bytes + np.concatenate([[0], np.bincount(rank, sizes).cumsum()])
    # The whole text: these documents and the cut ones, whose ends are `fraction` of them.
    text_bytes = bytes_held_out[-1] - end_bytes + end_bytes / fraction
    lowest = 0 if end_bytes else 1
    highest = len(hashes) - 1  # at least one stays for training
    num_held_out = min(max(int((hashes < np.uint64(fraction * 2**64)).sum()), lowest), highest)
    while num_held_out > lowest and bytes_held_out[num_held_out] > 2 * fraction * text_bytes:
        num_held_out -= 1
    while num_held_out < highest and bytes_held_out[num_held_out] < fraction / 2 * text_bytes:
        num_held_out += 1
    return rank < num_held_out


def split_by_source(spool: Spool, validation: Spool) -> Split:
    """Return a split of two sources, each stored in a temporary file: the documents of `spool` are
    for training, those of `validation` for validation.

    Raises:
        WakefulError: a text is in both sources, so that a loss on it would measure memorization.
    """
    training_keys, validation_keys = spool.normalized_digests, validation.normalized_digests
    # First find documents that agree in half of the digest, which is fast, then compare all of it.
    candidates = np.flatnonzero(np.isin(validation_keys["low"], training_keys["low"], kind="sort"))
    for number in candidates:
        copies = np.flatnonzero(training_keys == validation_keys[number])
        if len(copies):
            raise WakefulError(
                f"validation overlaps training: {validation.name(int(number))!r} of the validation "
                f"source is the same text as {spool.name(int(copies[0]))!r} of the training "
                "source: take it out of one of them"
            )
    return Split(
        SplitSide(spool, np.ones(len(spool), bool)),
        SplitSide(validation, np.ones(len(validation), bool)),
        rule="a source of its own",
    )


def _check_can_be_cut(document: Document, fraction: float) -> None:
    """Raise `WakefulError` if a source's only document cannot be cut: its training text or its
    validation text would be blank.
    """
    end = _training_end(document.text, fraction)
    if not document.text[:end].strip() or not document.text[end:].strip():
        raise WakefulError(
            f"the one document {document.name!r} of {len(document.text)} characters is too short "
            "to keep a part for validation: pass more text or a validation source"
        )


def _training_end(text: str, fraction: float) -> int:
    """Return the position (in characters) where a document's training part ends: at the end of a
    line, unless that would give validation more than twice its `fraction`.
    """
    end = round(len(text) * (1 - fraction))
    smallest = max(0, round(len(text) * (1 - 2 * fraction)))
    after_newline = text.rfind("\n", smallest, end) + 1  # 0 where no line ends there
    return after_newline or end
