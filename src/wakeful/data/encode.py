"""Documents to token files, a batch of texts at a time."""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from wakeful.data.progress import BATCH_BYTES, Progress, Steps
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


def side_texts(side: Side, stage: str, progress: Progress) -> Iterator[str]:
    """The texts of one side, `progress` told of the bytes gone through."""
    step, done = Steps(stage, side.num_bytes, progress), 0
    for document in side.spool.read(side.wanted):
        yield document.text
        done += len(document.text.encode("utf-8"))
        step.reach(done)
    step.finish(done)


def write_split(
    folder: Path, split: SplitName, side: Side, tokenizer: Tokenizer, progress: Progress
) -> dict[str, Any]:
    """Write the tokens and the documents of one split; returns its facts for `data.json`."""
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
    """Pieces of text, each with whether it is its document's last, about BATCH_BYTES at a time."""
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
