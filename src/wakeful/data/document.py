"""One text with a name, and the hash that names a whole corpus."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where it came from.

    `name` is relative to its source (a path inside a folder, `file.jsonl:12` for line 12,
    `file.parquet:12` for row 12), so that a corpus keeps its hash when its folder moves.
    """

    name: str
    text: str


class DocumentsHasher:
    """SHA-256 of a stream of documents: over every name and the SHA-256 of every text.

    Both parts are of known length where they are fed, so no two different corpora can feed the
    same bytes. The texts' own digests are handed back because splitting and the search for
    duplicates need them too, and hashing a corpus once is enough.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, document: Document) -> bytes:
        """Feed one document; returns the SHA-256 of its text (32 bytes)."""
        name = document.name.encode("utf-8", "surrogateescape")
        digest = hashlib.sha256(document.text.encode("utf-8")).digest()
        self._hash.update(len(name).to_bytes(8, "little") + name + digest)
        return digest

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def documents_hash(documents: Iterable[Document]) -> str:
    """The SHA-256 of `documents` in their order, as hexadecimal digits; see `DocumentsHasher`."""
    hasher = DocumentsHasher()
    for document in documents:
        hasher.update(document)
    return hasher.hexdigest()
