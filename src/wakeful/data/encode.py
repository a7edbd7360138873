"""Documents to token files, a batch of texts at a time, and how such work says how far it is."""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from wakeful.data.split import Side
from wakeful.data.tokenizer import Tokenizer
from wakeful.data.tokens import (
    DTYPES,
    SplitName,
    documents_path,
    file_sha256,
    token_dtype,
    tokens_path,
)

Progress = Callable[[str, int, int | None], None]
"""Called with a stage ("reading", "tokenizer", "encoding", "comparing"), the bytes of text done,
and how many there are."""

BATCH_BYTES = 2**20  # of text between two writes and two calls of `progress`


def no_progress(_stage: str, _done: int, _total: int | None) -> None:
    """Tell nobody."""


class Steps:
    """Calls `progress` once every BATCH_BYTES, and at the end."""

    def __init__(self, stage: str, total: int | None, progress: Progress) -> None:
        self._stage, self._total, self._progress = stage, total, progress
        self._next = 0

    def reach(self, done: int) -> None:
        """Say that so many bytes are done."""
        if done >= self._next:
            self._progress(self._stage, done, self._total)
            self._next = done + BATCH_BYTES

    def finish(self, done: int) -> None:
        """Say that everything is done, so many bytes."""
        self._progress(self._stage, done, done)


def side_texts(side: Side, stage: str, progress: Progress) -> Iterator[str]:
    """Return the texts of one side, and tell `progress` of the bytes gone through."""
    step, done = Steps(stage, side.num_bytes, progress), 0
    for document in side.spool.read(side.wanted):
        yield document.text
        done += len(document.text.encode("utf-8"))
        step.reach(done)
    step.finish(done)


def write_split(
    folder: Path, split: SplitName, side: Side, tokenizer: Tokenizer, progress: Progress
) -> dict[str, Any]:
    """Write the tokens and the documents of one split and return its facts for `data.json`."""
    dtype = DTYPES[token_dtype(tokenizer.vocab_size)]
    starts, num_tokens = array("q"), 0
    with tokens_path(folder, split).open("wb") as file:
        new = True
        for batch in _batches(side_texts(side, "encoding", progress), tokenizer):
            encoded = tokenizer.encode_batch([piece for piece, _ in batch])
            for ids, (_, last) in zip(encoded, batch, strict=True):
                if new:
                    starts.append(num_tokens)
                if last:
                    ids.append(tokenizer.end_of_text)
                file.write(np.asarray(ids, dtype).tobytes())
                num_tokens += len(ids)
                new = last
    np.save(documents_path(folder, split), np.asarray(starts, "<i8"), allow_pickle=False)
    return {
        "documents": len(starts),
        "tokens": num_tokens,
        "bytes": side.num_bytes,
        "sha256": file_sha256(tokens_path(folder, split)),
        "documents_sha256": file_sha256(documents_path(folder, split)),
    }


def _batches(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[list[tuple[str, bool]]]:
    """Return batches of some BATCH_BYTES: pieces, each with whether its document ends there."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        left = len(text)
        for piece in tokenizer.pieces(text):
            left -= len(piece)
            batch.append((piece, left == 0))
            size += len(piece)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
