"""From a source of text to a folder of tokens: read, split, train a tokenizer, encode, move in."""

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wakeful.config.schema import TextConfig
from wakeful.data.encode import Progress, Steps, no_progress, side_texts, write_split
from wakeful.data.overlap import drop_overlap
from wakeful.data.sources import PYTHON_STDLIB, listed, read_documents, source_manifest
from wakeful.data.split import Spool, split_by_hash, split_from_source
from wakeful.data.tokenizer import Tokenizer
from wakeful.data.tokens import (
    FORMAT,
    VERSION,
    PreparedData,
    building_beside,
    existing_data,
    move_in,
    token_dtype,
)
from wakeful.errors import WakefulError
from wakeful.paths import default_cache_dir


def preparation(config: TextConfig) -> dict[str, Any]:
    """Return the arguments of `prepare` and `prepared` that a configuration's fields stand for."""
    return {
        "tokenizer": config.tokenizer or None,
        "vocab_size": None if config.tokenizer else config.vocab_size,
        "validation_source": config.validation_source or None,
        "validation_fraction": config.validation_fraction,
        "max_bytes": config.max_bytes or None,
        "text_field": config.text_field,
        "keep_overlap": config.keep_overlap,
    }


def prepare(
    source: str | Sequence[str],
    folder: str | Path,
    *,
    tokenizer: Tokenizer | str | Path | None = None,
    vocab_size: int | None = None,
    validation_source: str | Sequence[str] | None = None,
    validation_fraction: float = TextConfig.validation_fraction,
    max_bytes: int | None = None,
    text_field: str = TextConfig.text_field,
    seed: int = 0,
    keep_overlap: bool = TextConfig.keep_overlap,
    progress: Progress | None = None,
) -> PreparedData:
    """Write the tokens of `source` into `folder`, or take what is there if it is the same.

    Either a `tokenizer` is given (one, or the path of one) or one of `vocab_size` is trained, on
    the training documents alone. About `validation_fraction` of the documents are kept for
    validation (see `split_by_hash`), or all those of `validation_source`; unless `keep_overlap`,
    held-out documents that stand in the training text in part are dropped, and a validation source
    that does is refused (see `drop_overlap`). `max_bytes` of `source` are taken, in UTF-8. The
    folder appears when it is whole and not before; meanwhile a copy of the text lies beside it.

    Raises:
        WakefulError: the source cannot be read, an option is out of its range, a text is in both
            sources, the folder holds something else, or the disk is full.
    """
    folder, progress = Path(folder).expanduser().absolute(), progress or no_progress
    tokenizer = _chosen_tokenizer(tokenizer, vocab_size)
    _check_options(validation_source, validation_fraction, max_bytes)
    _check_outside(folder, source)
    settings = {
        "vocab_size": vocab_size,
        "tokenizer": tokenizer and [tokenizer.fingerprint, tokenizer.end_of_text_token],
        "validation_fraction": None if validation_source is not None else validation_fraction,
        "max_bytes": max_bytes,
        "text_field": text_field,
        "seed": None if validation_source is not None else seed,
        "keep_overlap": keep_overlap,
    }
    manifest = data_manifest(source, validation_source)
    existing = existing_data(folder, settings)
    if existing is not None and existing.info.get("manifest") == manifest:
        return existing

    with building_beside(folder) as building:
        scratch = building / "scratch"
        scratch.mkdir()
        spools = [_spool(source, scratch / "source", max_bytes, text_field, progress)]
        if validation_source is not None:
            spools.append(
                _spool(validation_source, scratch / "validation", None, text_field, progress)
            )
        corpora = [spool.corpus_sha256 for spool in spools]
        if existing is not None:  # files were touched: are the texts still the same?
            if existing.info.get("corpora_sha256") == corpora:
                return existing
            raise WakefulError(
                f"{folder} was prepared from another state of the source: "
                "delete it or choose another folder"
            )
        if validation_source is None:
            split = split_by_hash(
                spools[0], fraction=validation_fraction, seed=seed, scratch=scratch / "parts"
            )
        else:
            split = split_from_source(*spools)
        if tokenizer is None:
            assert vocab_size is not None
            tokenizer = Tokenizer.train(side_texts(split.train, "tokenizer", progress), vocab_size)
        info = {
            "format": FORMAT,
            "version": VERSION,
            "source": listed(source),
            "validation_source": [] if validation_source is None else listed(validation_source),
            "manifest": manifest,
            "corpora_sha256": corpora,
            "settings": settings,
            "split_rule": split.rule,
            "tokenizer": {
                "fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
                "end_of_text": tokenizer.end_of_text,
            },
            "dtype": token_dtype(tokenizer.vocab_size),
            "splits": {
                "train": write_split(building, "train", split.train, tokenizer, progress),
                "validation": write_split(
                    building, "validation", split.validation, tokenizer, progress
                ),
            },
        }
        if not keep_overlap:
            side = split.validation
            progress("comparing", 0, side.num_bytes)
            found = drop_overlap(PreparedData(building, info), side.spool.lengths[side.wanted])
            progress("comparing", side.num_bytes, side.num_bytes)
            info["splits"]["validation"], info["overlap"] = found["validation"], found["overlap"]
        tokenizer.save(building)
        shutil.rmtree(scratch)
        (building / "data.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
        move_in(building, folder, settings)
    return PreparedData.open(folder)


def data_manifest(
    source: str | Sequence[str], validation_source: str | Sequence[str] | None
) -> str:
    """Return a hash that changes when a file of either source does; see `source_manifest`."""
    parts = [source_manifest(source)]
    if validation_source is not None:
        parts.append(source_manifest(validation_source))
    return hashlib.sha256(":".join(parts).encode()).hexdigest()


def _chosen_tokenizer(
    tokenizer: Tokenizer | str | Path | None, vocab_size: int | None
) -> Tokenizer | None:
    if (tokenizer is None) == (vocab_size is None):
        raise WakefulError(
            "pass either tokenizer, one to use, or vocab_size, the size of one to train: "
            + ("neither was given" if tokenizer is None else "both were given")
        )
    return Tokenizer.load(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer


def _check_options(
    validation_source: object, validation_fraction: float, max_bytes: int | None
) -> None:
    if validation_source is None and not 0 < validation_fraction < 1:
        raise WakefulError(
            f"validation_fraction is {validation_fraction}: it must lie between 0 and 1"
        )
    if max_bytes is not None and max_bytes < 1:
        raise WakefulError(f"max_bytes is {max_bytes}: it must be at least 1")


def _check_outside(folder: Path, source: str | Sequence[str]) -> None:
    for one in listed(source):
        path = Path(one).expanduser()
        if path.is_dir() and folder.resolve().is_relative_to(path.resolve()):
            raise WakefulError(
                f"{folder} lies inside its source {one}, and would be read as text the next time: "
                "choose a folder outside it"
            )


def _spool(
    source: str | Sequence[str],
    path: Path,
    max_bytes: int | None,
    text_field: str,
    progress: Progress,
) -> Spool:
    spool = Spool(path)
    step = Steps("reading", max_bytes, progress)
    documents = read_documents(source, text_field=text_field)
    spool.fill(documents, max_bytes=max_bytes, progress=step.reach)
    if not len(spool):
        raise WakefulError(f"max_bytes is {max_bytes}, less than the first character has: raise it")
    step.finish(spool.num_bytes)
    return spool


def prepared(
    source: str | Sequence[str] = PYTHON_STDLIB,
    *,
    tokenizer: Tokenizer | str | Path | None = None,
    vocab_size: int | None = None,
    validation_source: str | Sequence[str] | None = None,
    validation_fraction: float = TextConfig.validation_fraction,
    max_bytes: int | None = None,
    text_field: str = TextConfig.text_field,
    seed: int = 0,
    keep_overlap: bool = TextConfig.keep_overlap,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> PreparedData:
    """Return what `prepare` writes into the cache (`cache_dir`, or `default_cache_dir()`).

    The folder's name holds a hash of the settings and of every file's path, size and time of
    change, so a second call reads no text, and changed files are prepared anew beside the old.

    Raises:
        WakefulError: as `prepare` does.
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
