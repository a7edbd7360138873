"""Documents set down on disk as they are read, to be gone over again without their source.

A source is read once: a dataset is fetched once, files that change meanwhile change nothing, and
no more than one document is in memory.
"""

import contextlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from wakeful.data.document import Document, DocumentsHasher

DIGEST = np.dtype([("low", "<u8"), ("high", "<u8")])


class Spool:
    """Documents in one file: for each the lengths of name and text, the name, the text (UTF-8)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0  # of text, in UTF-8
        self._file = path.open("wb")
        self._hasher = DocumentsHasher()
        self._starts = array("q")
        self._lengths = array("q")
        self._digests = bytearray()

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def corpus_sha256(self) -> str:
        return self._hasher.hexdigest()

    @property
    def digests(self) -> np.ndarray:
        """The first 128 bits of each text's SHA-256: equal where two texts are."""
        return np.frombuffer(bytes(self._digests), DIGEST)

    @property
    def lengths(self) -> np.ndarray:
        """Bytes of each text in UTF-8."""
        return np.array(self._lengths, np.int64)

    def fill(
        self,
        documents: Iterable[Document],
        *,
        max_bytes: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Take `documents` until their texts are `max_bytes` of UTF-8, the last one cut short.

        `progress` is told of `num_bytes` after each. Nothing can be added afterwards.
        """
        try:
            for document in documents:
                full = self._add(document, max_bytes)
                if progress is not None:
                    progress(self.num_bytes)
                if full:
                    break
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk is told of once
                self._file.close()
            raise
        self._file.close()

    def _add(self, document: Document, max_bytes: int | None) -> bool:
        """Take one document, and say whether `max_bytes` are there now.

        The digest is that of the whole text even where it is cut: its beginning must not be
        trained on either where the whole is for validation.
        """
        name = document.name.encode("utf-8", "surrogateescape")
        text = document.text.encode("utf-8")
        room = len(text) + 1 if max_bytes is None else max_bytes - self.num_bytes
        full = len(text) >= room
        if full:  # not through a character
            text = text[:room].decode("utf-8", "ignore").encode("utf-8")
        if not text:
            return full
        self._starts.append(self._file.tell())
        self._lengths.append(len(text))
        self._digests += self._hasher.update(document)[: DIGEST.itemsize]
        self._file.write(len(name).to_bytes(8, "little") + len(text).to_bytes(8, "little"))
        self._file.write(name + text)
        self.num_bytes += len(text)
        return full

    def read(self, wanted: np.ndarray) -> Iterator[Document]:
        """The documents where `wanted` (a boolean for each) is true, in their order."""
        with self.path.open("rb") as file:
            for number in np.flatnonzero(wanted):
                file.seek(self._starts[number])
                name_length = int.from_bytes(file.read(8), "little")
                text_length = int.from_bytes(file.read(8), "little")
                name = file.read(name_length).decode("utf-8", "surrogateescape")
                yield Document(name, file.read(text_length).decode("utf-8"))

    def name(self, number: int) -> str:
        wanted = np.zeros(len(self), bool)
        wanted[number] = True
        return next(self.read(wanted)).name
