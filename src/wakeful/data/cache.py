"""Prepared data kept for next time, in a folder named after its source and settings."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from wakeful.data.preparing import Progress, data_manifest, prepare
from wakeful.data.sources import PYTHON_STDLIB, listed
from wakeful.data.tokenizer import Tokenizer
from wakeful.data.tokens import VERSION, PreparedData
from wakeful.paths import default_cache_dir


def prepared(
    source: str | Sequence[str] = PYTHON_STDLIB,
    *,
    tokenizer: Tokenizer | str | Path | None = None,
    vocab_size: int | None = None,
    validation_source: str | Sequence[str] | None = None,
    validation_fraction: float = 0.05,
    max_bytes: int | None = None,
    text_field: str = "text",
    seed: int = 0,
    keep_overlap: bool = False,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> PreparedData:
    """`prepare` into the cache (`default_cache_dir()` where `cache_dir` is None), or take it.

    The folder's name holds a hash of the settings and of every file's path, size and time of
    change, so a second call reads no text, and changed files are prepared anew beside the old.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = Tokenizer.load(tokenizer)
    key = {
        "version": VERSION,
        "manifest": data_manifest(source, validation_source),
        "tokenizer": tokenizer
        and [tokenizer.fingerprint, tokenizer.end_of_text_token, sorted(tokenizer.beside.items())],
        "vocab_size": vocab_size,
        "validation_fraction": validation_fraction,
        "max_bytes": max_bytes,
        "text_field": text_field,
        "seed": seed,
        "keep_overlap": keep_overlap,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    label = re.sub(r"[^A-Za-z0-9]+", "-", Path(listed(source)[0]).stem).strip("-")[:40] or "text"
    root = default_cache_dir() if cache_dir is None else Path(cache_dir)
    return prepare(
        source,
        root / "data" / f"{label}-{digest}",
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        validation_source=validation_source,
        validation_fraction=validation_fraction,
        max_bytes=max_bytes,
        text_field=text_field,
        seed=seed,
        keep_overlap=keep_overlap,
        progress=progress,
    )
