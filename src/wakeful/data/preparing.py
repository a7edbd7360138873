"""From a source of text to a folder of tokens: read, split, train a tokenizer, encode, move in."""

import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wakeful.config.keywords import options_from
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
from wakeful.data.split import SplitSide, Spool, split_by_hash, split_by_source
from wakeful.data.tasks import TaskData, task_of
from wakeful.data.tokenizer import Tokenizer
from wakeful.data.tokens import (
    SPLITS,
    VERSION,
    PreparedData,
    check_free,
    is_prepared,
    open_prepared,
    publish_folder,
    temporary_folder_beside,
    token_dtype,
    write_splits,
)
from wakeful.digests import joined_sha256, json_digest
from wakeful.errors import WakefulError
from wakeful.paths import default_cache_dir, expand_home, install_folder
from wakeful.terminal.display import Display

Progress = Callable[[str, int, int | None], None]
"""Called with a stage ("reading", "tokenizer", "encoding", "comparing"), the bytes of text done and
their total."""

BATCH_BYTES = 2**20
"""Bytes of text per encoded batch, and between two calls of `progress`."""
_SPLIT_VERSION = 2
"""Version of the rule that splits documents (`split_by_hash`), part of the names in the cache."""


def prepare(
    source: str | Sequence[str],
    folder: str | Path,
    *,
    tokenizer: Tokenizer | str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    options: TextConfig | None = None,
    **kwargs: Any,
) -> PreparedData:
    """Tokenize the text of `source` into a new `folder`; return its data.

    `options`, whose fields are keyword arguments too, decide how. A given `tokenizer` (or its path)
    replaces the one that they name or train; a tokenizer is trained on the training documents
    alone. About `validation_fraction` of the text is held out for validation (see `split_by_hash`,
    which takes `seed`), or all documents of `validation_source` are. Unless `keep_overlap` is set,
    validation documents that overlap the training text are dropped; a `validation_source` that
    overlaps is refused (see `drop_overlap`). `max_bytes` limits the text of `source`, in UTF-8. A
    temporary folder beside `folder`, with a copy of the text, is renamed to it when complete.

    Raises:
        WakefulError: the source cannot be read, an option is out of its range, a text is in both
            sources, the folder is not empty, or the disk is full.
    """
    config = options_from(TextConfig, kwargs, options)
    folder = expand_home(folder).absolute()
    progress = progress or Display().stage
    tokenizer = _load_tokenizer(tokenizer, config)
    fraction, validation_source = config.validation_fraction, config.validation_source
    if not validation_source and not 0 < fraction < 1:
        raise WakefulError(f"validation_fraction is {fraction}: it must lie between 0 and 1")
    check_free(folder)
    _check_outside(folder, source)
    if any(map(mixture_of, single_sources(source))):
        raise WakefulError(
            "a mixture's parts are prepared by the run that names it, each into a folder of its "
            "own in the cache: prepare a part by itself, or train on the mixture"
        )
    settings = {
        "vocab_size": config.vocab_size if tokenizer is None else None,
        "tokenizer": tokenizer and [tokenizer.fingerprint, tokenizer.end_of_text_token],
        "validation_fraction": None if validation_source else fraction,
        "max_bytes": config.max_bytes or None,
        "text_field": config.text_field,
        "seed": None if validation_source else seed,
        "keep_overlap": config.keep_overlap,
    }
    with temporary_folder_beside(folder) as building:
        scratch = building / "scratch"
        scratch.mkdir()
        spools = [_store_documents(source, scratch / "source", config, progress)]
        if validation_source:
            whole = dataclasses.replace(config, max_bytes=0)
            spools.append(
                _store_documents(validation_source, scratch / "validation", whole, progress)
            )
            split = split_by_source(*spools)
        else:
            split = split_by_hash(
                spools[0], fraction=fraction, seed=seed, scratch=scratch / "parts"
            )
        if tokenizer is None:
            texts = _read_texts(split.train, "tokenizer", progress)
            tokenizer = Tokenizer.train(texts, config.vocab_size)
        encoded = [
            (_encode_documents(side, tokenizer, progress), side.num_bytes)
            for side in (split.train, split.validation)
        ]
        info = write_splits(
            building,
            tokenizer,
            dict(zip(SPLITS, encoded, strict=True)),
            source=single_sources(source),
            validation_source=[validation_source] if validation_source else [],
            corpora_sha256=[spool.corpus_sha256 for spool in spools],
            settings=settings,
            split_rule=split.rule,
        )
        if not config.keep_overlap:
            side = split.validation
            progress("comparing", 0, side.num_bytes)
            drop_overlap(PreparedData(building, info), side.spool.lengths[side.mask])
            progress("comparing", side.num_bytes, side.num_bytes)
        tokenizer.save(building)
        shutil.rmtree(scratch)
        publish_folder(building, folder, info)
    return PreparedData.open(folder)


def prepare_data(
    source: str | Sequence[str] = PYTHON_STDLIB,
    *,
    tokenizer: Tokenizer | str | Path | None = None,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
    options: TextConfig | None = None,
    **kwargs: Any,
) -> PreparedData:
    """Prepare a source into a folder of the cache (`cache_dir`, else `default_cache_dir()`), or
    open the folder where it exists.

    `tokenizer` and `options` are those of `prepare`. The folder's name contains a hash of the
    tokenizer, the options and every file's path, size and time of change. So a second call reads no
    text, and changed files are prepared into a new folder.
    """
    config = options_from(TextConfig, kwargs, options)
    tokenizer = _load_tokenizer(tokenizer, config)
    sources = filter(None, [source, config.validation_source])
    key = {
        "version": VERSION,
        "split": _SPLIT_VERSION,
        "manifest": joined_sha256(*map(source_manifest, sources)),
        "tokenizer": tokenizer
        and [
            tokenizer.fingerprint,
            tokenizer.end_of_text_token,
            sorted(tokenizer.companion_files.items()),
        ],
        "vocab_size": config.vocab_size if tokenizer is None else None,
        "validation_fraction": config.validation_fraction,
        "max_bytes": config.max_bytes or None,
        "text_field": config.text_field,
        "seed": 0,  # the default of `prepare`
        "keep_overlap": config.keep_overlap,
    }
    stem = Path(single_sources(source)[0]).stem
    label = re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-")[:40] or "text"
    root = default_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = root / "data" / f"{label}-{json_digest(key)}"
    if is_prepared(folder):
        return PreparedData.open(folder)
    return prepare(source, folder, tokenizer=tokenizer, progress=progress, options=config)


def load_data(
    config: DataConfig,
    progress: Progress | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> Data:
    """Return the data that a configuration's source names: a task, a mixture, a prepared folder, or
    text, which is prepared into the cache if necessary.

    A `tokenizer` replaces the one that the configuration names or trains. With it the source cannot
    name a task, because a task has a tokenizer of its own.
    """
    source = config.source
    task = task_of(source) if tokenizer is None else None
    if task is not None:
        return TaskData(task)
    return (
        load_mixture(config, source, progress, tokenizer=tokenizer)
        or open_prepared(source)
        or prepare_data(source, tokenizer=tokenizer, progress=progress, options=config)
    )


def load_mixture(
    config: TextConfig,
    source: str,
    progress: Progress | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> MixedData | None:
    """Prepare the domains of a mixture and return them as one; None for a source that is no
    mixture.

    `max_bytes` and `validation_fraction` apply to each domain that is a text. All domains share one
    tokenizer: the given one, else the one that `config` names, else that of a domain that is
    already prepared, else one trained on the training documents of all domains.

    Raises:
        WakefulError: `validation_source` is set, a domain was prepared with another tokenizer, or
            `prepare` refuses a domain.
    """
    domains = mixture_of(source)
    if domains is None:
        return None
    if config.validation_source:
        raise WakefulError(
            f"data.validation_source = {config.validation_source!r} does nothing: each part of a "
            "mixture is validated on what is held out of it; leave it out"
        )
    prepared: dict[str, PreparedData] = {}
    for domain in domains:
        if (data := open_prepared(domain.source)) is not None:
            prepared[domain.name] = data
    if tokenizer is None and config.tokenizer:
        tokenizer = Tokenizer.load(config.tokenizer)
    if tokenizer is None and prepared:
        tokenizer = next(iter(prepared.values())).tokenizer
    if tokenizer is None:
        tokenizer = _shared_tokenizer(domains, config, progress or Display().stage)
    for name, data in prepared.items():
        if not data.tokenizer.same_tokens(tokenizer):
            raise WakefulError(
                f"{name}, {data.folder}, was prepared with another tokenizer than the rest of the "
                "mixture: prepare it with the same (--tokenizer)"
            )
    parts = [
        prepared.get(domain.name)
        or prepare_data(domain.source, tokenizer=tokenizer, progress=progress, options=config)
        for domain in domains
    ]
    return MixedData(source, domains, parts, tokenizer)


def reopen_data(config: DataConfig) -> Data | None:
    """Open the data of `config.source` if it names a prepared folder, or a mixture in which every
    part is one; return None otherwise, as when a folder no longer exists.
    """
    domains = mixture_of(config.source)
    sources = [config.source] if domains is None else [domain.source for domain in domains]
    return load_data(config) if all(map(open_prepared, sources)) else None


def _shared_tokenizer(
    domains: Sequence[Domain], config: TextConfig, progress: Progress
) -> Tokenizer:
    """Load the tokenizer that all domains share from the cache; if it is not there, train it on the
    training documents of all domains and store it.

    Its folder in the cache is named by a hash of the domains' files and of the options on which
    the tokenizer depends.
    """
    key = {
        "version": VERSION,
        "split": _SPLIT_VERSION,
        "manifests": [source_manifest(domain.source) for domain in domains],
        **{
            name: getattr(config, name)
            for name in ("vocab_size", "validation_fraction", "max_bytes", "text_field")
        },
    }
    folder = default_cache_dir() / "data" / f"{MIXTURE}-{json_digest(key)}"
    if not (folder / "tokenizer.json").is_file():
        with temporary_folder_beside(folder) as building:
            sides: list[SplitSide] = []
            for number, domain in enumerate(domains):
                scratch = building / "scratch" / str(number)
                scratch.mkdir(parents=True)
                spool = _store_documents(domain.source, scratch / "source", config, progress)
                fraction = config.validation_fraction
                # The seed by which `prepare` will split the domain.
                split = split_by_hash(spool, fraction=fraction, seed=0, scratch=scratch / "parts")
                sides.append(split.train)
            texts = (text for side in sides for text in _read_texts(side, "tokenizer", progress))
            tokenizer = Tokenizer.train(texts, config.vocab_size)
            shutil.rmtree(building / "scratch")
            tokenizer.save(building)
            install_folder(building, folder, "tokenizer.json")
    return Tokenizer.load(folder)


def _load_tokenizer(
    tokenizer: Tokenizer | str | Path | None, config: TextConfig
) -> Tokenizer | None:
    """Return the given tokenizer, else the one that `config` names; load it if it is a path. None
    if neither is given: one has to be trained.
    """
    tokenizer = tokenizer or config.tokenizer or None
    return Tokenizer.load(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer


def _check_outside(folder: Path, source: str | Sequence[str]) -> None:
    """Raise `WakefulError` where the folder to write lies inside a folder that is read as text."""
    for single in single_sources(source):
        path = expand_home(single)
        # `Path.is_dir` would raise for a source that is too long for a path, such as a mixture.
        if os.path.isdir(path) and folder.resolve().is_relative_to(path.resolve()):
            raise WakefulError(
                f"{folder} lies inside its source {single}, and would be read as text the next "
                "time: choose a folder outside it"
            )


def _report_bytes(
    documents: Iterable[Document], stage: str, total: int | None, progress: Progress
) -> Iterator[Document]:
    """Yield documents unchanged; call `progress` after the first, and about every BATCH_BYTES of
    their text. `total` is the number of bytes to expect, None where it is unknown.
    """
    num_bytes = next_report = 0
    for document in documents:
        yield document
        num_bytes += len(document.text.encode("utf-8"))
        if num_bytes >= next_report:
            progress(stage, num_bytes, total)
            next_report = num_bytes + BATCH_BYTES


def _store_documents(
    source: str | Sequence[str], path: Path, config: TextConfig, progress: Progress
) -> Spool:
    """Store the documents of a source, up to `config.max_bytes` of text, in a file at `path`;
    return the `Spool` that reads them.
    """
    spool, max_bytes = Spool(path), config.max_bytes or None
    documents = read_documents(source, text_field=config.text_field)
    spool.fill(_report_bytes(documents, "reading", max_bytes, progress), max_bytes=max_bytes)
    if not len(spool):  # an empty source was refused when it was read
        raise WakefulError(f"max_bytes is {max_bytes}, less than the first character has: raise it")
    progress("reading", spool.num_bytes, spool.num_bytes)
    return spool


def _read_texts(side: SplitSide, stage: str, progress: Progress) -> Iterator[str]:
    """Yield the texts of the training or of the validation documents; call `progress` with `stage`
    and the bytes of text that were read.
    """
    total = side.num_bytes
    for document in _report_bytes(side.spool.read(side.mask), stage, total, progress):
        yield document.text
    progress(stage, total, total)


def _encode_documents(
    side: SplitSide, tokenizer: Tokenizer, progress: Progress
) -> Iterator[np.ndarray]:
    """Yield the ids of each document, followed by end_of_text: (tokens,), uint16 or uint32.

    Documents are cut into pieces. Pieces of several documents are encoded in one batch, and then
    joined to documents again.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    pieces_of_document: list[np.ndarray] = []
    for batch in _batch_pieces(_read_texts(side, "encoding", progress), tokenizer):
        encoded = tokenizer.encode_batch([piece for piece, _ in batch])
        for ids, (_, ends_document) in zip(encoded, batch, strict=True):
            if ends_document:
                ids.append(tokenizer.end_of_text)
            pieces_of_document.append(np.asarray(ids, dtype))
            if ends_document:
                yield np.concatenate(pieces_of_document)
                pieces_of_document = []


def _batch_pieces(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[list[tuple[str, bool]]]:
    """Split texts into pieces, and yield them in batches of about BATCH_BYTES characters; each
    piece comes with True where it ends its text.
    """
    batch: list[tuple[str, bool]] = []
    num_characters = 0
    for text in texts:
        remaining = len(text)
        for piece in tokenizer.encoder.split_text(text):
            remaining -= len(piece)
            batch.append((piece, remaining == 0))
            num_characters += len(piece)
            if num_characters >= BATCH_BYTES:
                yield batch
                batch, num_characters = [], 0
    if batch:
        yield batch
