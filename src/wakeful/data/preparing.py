"""From a source of text to a folder of tokens: read, split, train a tokenizer, encode, move in."""

import inspect
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wakeful.config.schema import DataConfig, TextConfig
from wakeful.data.base import Data
from wakeful.data.mixture import Domain, MixedData, mixture_of
from wakeful.data.overlap import drop_overlap
from wakeful.data.readers import Document
from wakeful.data.sources import (
    MIXTURE,
    PYTHON_STDLIB,
    read_documents,
    single_sources,
    source_manifest,
)
from wakeful.data.split import SplitSide, Spool, split_by_hash, split_from_source
from wakeful.data.tasks.base import TaskData, task_of
from wakeful.data.tokenizer import Tokenizer
from wakeful.data.tokens import (
    SPLITS,
    VERSION,
    PreparedData,
    building_beside,
    existing_data,
    move_in,
    open_prepared,
    token_dtype,
    write_splits,
)
from wakeful.digests import joined_sha256, json_digest
from wakeful.errors import WakefulError
from wakeful.paths import default_cache_dir, expand_home, install_folder
from wakeful.terminal.display import Display

Progress = Callable[[str, int, int | None], None]
"""Called with a stage ("reading", "tokenizer", "encoding", "comparing"), the bytes of text done,
and how many there are."""

BATCH_BYTES = 2**20
"""Of text between two writes and two calls of `progress`."""


def preparation(config: TextConfig, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """Return the arguments of `prepare` and `prepare_data` that a configuration's fields stand for,
    with a given tokenizer instead of the one they name or train.
    """
    chosen = config.tokenizer or None if tokenizer is None else tokenizer
    return {
        "tokenizer": chosen,
        "vocab_size": config.vocab_size if chosen is None else None,
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
    held-out documents that partly occur in the training text are dropped, and a validation source
    that does is refused (see `drop_overlap`). `max_bytes` of `source` are taken, in UTF-8. The
    folder appears when it is whole and not before; meanwhile a copy of the text lies beside it.

    Raises:
        WakefulError: the source cannot be read, an option is out of its range, a text is in both
            sources, the folder holds something else, or the disk is full.
    """
    folder, progress = expand_home(folder).absolute(), progress or Display().stage
    tokenizer = _chosen_tokenizer(tokenizer, vocab_size)
    if validation_source is None and not 0 < validation_fraction < 1:
        raise WakefulError(
            f"validation_fraction is {validation_fraction}: it must lie between 0 and 1"
        )
    if max_bytes is not None and max_bytes < 1:
        raise WakefulError(f"max_bytes is {max_bytes}: it must be at least 1")
    _check_outside(folder, source)
    if any(map(mixture_of, single_sources(source))):
        raise WakefulError(
            "a mixture's parts are prepared by the run that names it, each into a folder of its "
            "own in the cache: prepare a part by itself, or train on the mixture"
        )
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
        spools = [_store_documents(source, scratch / "source", max_bytes, text_field, progress)]
        if validation_source is not None:
            spools.append(
                _store_documents(
                    validation_source, scratch / "validation", None, text_field, progress
                )
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
            tokenizer = Tokenizer.train(_texts(split.train, "tokenizer", progress), vocab_size)
        held, sides = validation_source, (split.train, split.validation)
        encoded = [(_encode_documents(side, tokenizer, progress), side.num_bytes) for side in sides]
        info = write_splits(
            building,
            tokenizer,
            dict(zip(SPLITS, encoded, strict=True)),
            source=single_sources(source),
            validation_source=[] if held is None else single_sources(held),
            manifest=manifest,
            corpora_sha256=corpora,
            settings=settings,
            split_rule=split.rule,
        )
        if not keep_overlap:
            side = split.validation
            progress("comparing", 0, side.num_bytes)
            drop_overlap(PreparedData(building, info), side.spool.lengths[side.mask])
            progress("comparing", side.num_bytes, side.num_bytes)
        tokenizer.save(building)
        shutil.rmtree(scratch)
        move_in(building, folder, info)
    return PreparedData.open(folder)


def prepare_data(
    source: str | Sequence[str] = PYTHON_STDLIB,
    *,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> PreparedData:
    """Return the data that `prepare` writes into the cache (`cache_dir`, or `default_cache_dir()`).

    `options` are those of `prepare`. The folder's name holds a hash of them and of every file's
    path, size and time of change, so a second call reads no text, and changed files are prepared
    again beside the old.
    """
    parameters = list(inspect.signature(prepare).parameters.values())[2:]
    options = (
        {option.name: option.default for option in parameters} | options | {"progress": progress}
    )
    tokenizer = options["tokenizer"]
    if isinstance(tokenizer, str | Path):
        options["tokenizer"] = tokenizer = Tokenizer.load(tokenizer)
    plain = ("vocab_size", "validation_fraction", "max_bytes", "text_field", "seed", "keep_overlap")
    key = {
        "version": VERSION,
        "split": 2,  # the number of its rule
        "manifest": data_manifest(source, options["validation_source"]),
        "tokenizer": tokenizer
        and [tokenizer.fingerprint, tokenizer.end_of_text_token, sorted(tokenizer.beside.items())],
        **{name: options[name] for name in plain},
    }
    stem = Path(single_sources(source)[0]).stem
    label = re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-")[:40] or "text"
    root = default_cache_dir() if cache_dir is None else Path(cache_dir)
    return prepare(source, root / "data" / f"{label}-{json_digest(key)}", **options)


def load_data(
    config: DataConfig,
    progress: Progress | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    imports: bool = False,
) -> Data:
    """Return the tokens that a configuration names, preparing and caching them if need be.

    With a `tokenizer` text is prepared with it, and a task, which has one of its own, is not looked
    for. `imports` lets a task's module be imported: only for a source that the user wrote.
    """
    source = config.source
    task = task_of(source, imports=imports) if tokenizer is None else None
    return (
        (task and TaskData(task))
        or load_mixture(config, source, progress, tokenizer=tokenizer)
        or open_prepared(source)
        or prepare_data(source, progress=progress, **preparation(config, tokenizer))
    )


def load_mixture(
    config: TextConfig,
    source: str,
    progress: Progress | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> MixedData | None:
    """Return the prepared domains of a mixture; None where the source is not one.

    `max_bytes` and `validation_fraction` are of each domain that is a text. The tokenizer of all is
    the given one, the one that `config` names, that of a domain that is prepared already, or else
    one that is trained on the training documents of all.

    Raises:
        WakefulError: as `prepare` does; a domain is prepared with another tokenizer, or
            validation_source is set.
    """
    domains = mixture_of(source)
    if domains is None:
        return None
    if config.validation_source:
        raise WakefulError(
            f"data.validation_source = {config.validation_source!r} does nothing: each part of a "
            "mixture is validated on what is held out of it; leave it out"
        )
    there = {domain.name: data for domain in domains if (data := open_prepared(domain.source))}
    if tokenizer is None and config.tokenizer:
        tokenizer = Tokenizer.load(config.tokenizer)
    if tokenizer is None and there:
        tokenizer = next(iter(there.values())).tokenizer
    if tokenizer is None:
        tokenizer = _shared_tokenizer(domains, config, progress or Display().stage)
    for name, data in there.items():
        if not data.tokenizer.same_tokens(tokenizer):
            raise WakefulError(
                f"{name}, {data.folder}, was prepared with another tokenizer than the rest of the "
                "mixture: prepare it with the same (--tokenizer)"
            )
    options = preparation(config, tokenizer)
    parts = [
        there.get(domain.name) or prepare_data(domain.source, progress=progress, **options)
        for domain in domains
    ]
    return MixedData(source, domains, parts, tokenizer)


def reopen_data(config: DataConfig) -> Data | None:
    """Return the data at a `Data.place`; None where it, or a part of it, is no longer there."""
    sources = [domain.source for domain in mixture_of(config.source) or ()] or [config.source]
    return load_data(config) if all(map(open_prepared, sources)) else None


def _shared_tokenizer(
    domains: Sequence[Domain], config: TextConfig, progress: Progress
) -> Tokenizer:
    """Return a tokenizer trained on what the domains will train on, kept in the cache."""
    key = {
        "version": VERSION,
        "split": 2,
        "manifests": [source_manifest(domain.source) for domain in domains],
        **{
            name: getattr(config, name)
            for name in ("vocab_size", "validation_fraction", "max_bytes", "text_field")
        },
    }
    folder = default_cache_dir() / "data" / f"{MIXTURE}-{json_digest(key)}"
    if not (folder / "tokenizer.json").is_file():
        with building_beside(folder) as building:
            sides: list[SplitSide] = []
            for number, domain in enumerate(domains):
                scratch = building / "scratch" / str(number)
                scratch.mkdir(parents=True)
                spool = _store_documents(
                    domain.source, scratch / "source", config.max_bytes or None, config.text_field,
                    progress,
                )  # fmt: skip
                fraction = config.validation_fraction
                split = split_by_hash(spool, fraction=fraction, seed=0, scratch=scratch / "parts")
                sides.append(split.train)
            texts = (text for side in sides for text in _texts(side, "tokenizer", progress))
            tokenizer = Tokenizer.train(texts, config.vocab_size)
            shutil.rmtree(building / "scratch")
            tokenizer.save(building)
            install_folder(building, folder, "tokenizer.json")
    return Tokenizer.load(folder)


def data_manifest(
    source: str | Sequence[str], validation_source: str | Sequence[str] | None
) -> str:
    """Return a hash that changes when a file of either source does; see `source_manifest`."""
    sources = [source] if validation_source is None else [source, validation_source]
    return joined_sha256(*map(source_manifest, sources))


def _chosen_tokenizer(
    tokenizer: Tokenizer | str | Path | None, vocab_size: int | None
) -> Tokenizer | None:
    if (tokenizer is None) == (vocab_size is None):
        raise WakefulError(
            "pass either tokenizer, one to use, or vocab_size, the size of one to train: "
            + ("neither was given" if tokenizer is None else "both were given")
        )
    return Tokenizer.load(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer


def _check_outside(folder: Path, source: str | Sequence[str]) -> None:
    for single in single_sources(source):
        path = expand_home(single)
        # Not `Path.is_dir`, which raises where a source, a mixture say, is too long for a name.
        if os.path.isdir(path) and folder.resolve().is_relative_to(path.resolve()):
            raise WakefulError(
                f"{folder} lies inside its source {single}, and would be read as text the next "
                "time: choose a folder outside it"
            )


def _report_bytes(
    documents: Iterable[Document], stage: str, total: int | None, progress: Progress
) -> Iterator[Document]:
    """Yield documents unchanged, calling `progress` with the bytes so far every BATCH_BYTES."""
    done = due = 0
    for document in documents:
        yield document
        done += len(document.text.encode("utf-8"))
        if done >= due:
            progress(stage, done, total)
            due = done + BATCH_BYTES


def _store_documents(
    source: str | Sequence[str],
    path: Path,
    max_bytes: int | None,
    text_field: str,
    progress: Progress,
) -> Spool:
    """Read the documents of a source, up to `max_bytes` of text, into a file that replays them."""
    spool = Spool(path)
    documents = read_documents(source, text_field=text_field)
    spool.fill(_report_bytes(documents, "reading", max_bytes, progress), max_bytes=max_bytes)
    if not len(spool):
        raise WakefulError(f"max_bytes is {max_bytes}, less than the first character has: raise it")
    progress("reading", spool.num_bytes, spool.num_bytes)
    return spool


def _texts(side: SplitSide, stage: str, progress: Progress) -> Iterator[str]:
    """Return the texts of one side, and tell `progress` of the bytes gone through."""
    total = side.num_bytes
    for document in _report_bytes(side.spool.read(side.mask), stage, total, progress):
        yield document.text
    progress(stage, total, total)


def _encode_documents(
    side: SplitSide, tokenizer: Tokenizer, progress: Progress
) -> Iterator[np.ndarray]:
    """Yield the ids of each document, (tokens,), the end of text behind them."""
    dtype = token_dtype(tokenizer.vocab_size)
    parts: list[np.ndarray] = []
    for batch in _batches(_texts(side, "encoding", progress), tokenizer):
        encoded = tokenizer.encode_batch([piece for piece, _ in batch])
        for ids, (_, last) in zip(encoded, batch, strict=True):
            if last:
                ids.append(tokenizer.end_of_text)
            parts.append(np.asarray(ids, dtype))
            if last:
                yield np.concatenate(parts)
                parts = []


def _batches(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[list[tuple[str, bool]]]:
    """Return batches of some BATCH_BYTES: pieces, each with whether its document ends there."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        remaining = len(text)
        for piece in tokenizer.encoder.pieces(text):
            remaining -= len(piece)
            batch.append((piece, remaining == 0))
            size += len(piece)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
