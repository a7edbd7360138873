"""Documents that a model wrote, as prepared data: first in parts, then as one folder.

The parts lie in a hidden folder beside the one they are for, so that sampling that was cut off goes
on where it was. Each is whole or not there, and the folder appears when it is whole.
"""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from wakeful.data.overlap import NothingHeldOut, drop_overlap
from wakeful.data.readers import os_errors
from wakeful.data.split import DIGEST, held_out
from wakeful.data.tokenizer import Tokenizer
from wakeful.data.tokens import (
    SPLITS,
    PreparedData,
    building_beside,
    changed_settings,
    existing_data,
    move_in,
    token_dtype,
    write_splits,
)
from wakeful.errors import WakefulError
from wakeful.paths import part_beside
from wakeful.terminal.display import OnProgress, ignore_progress

Documents = list[list[int]]
_SETTINGS = "settings.json"
_MOST_EMPTY = 100
"""Documents in a row without a word, after which nothing more is waited for."""


class Parts:
    """The documents that were written so far."""

    def __init__(self, folder: Path, settings: dict[str, Any], neutral: Mapping[str, Any]) -> None:
        """Find the parts that are for `folder`; refuse those begun with other settings."""
        self.path = folder.parent / f".{folder.name}.sampling"
        self._settings = settings
        file = self.path / _SETTINGS
        if not file.is_file():
            return
        changed = changed_settings(_read(file), settings, neutral)
        if changed:
            raise WakefulError(
                f"{folder} was begun with another {changed}: go on with the same, or delete "
                f"{self.path} to begin anew"
            )

    def part(self, number: int, write: Callable[[int], Documents]) -> Documents:
        """Return a part: the one that is there, or what `write` gives, which then is.

        Raises:
            WakefulError: it is damaged, or the disk cannot be written.
        """
        file = self.path / f"part-{number:06d}.json"
        if file.is_file():
            return self._documents(file)
        documents = write(number)
        cure = "free some space, and the same command goes on"
        with os_errors(f"cannot write {self.path}", cure):
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / _SETTINGS).is_file():
                _replace(self.path / _SETTINGS, self._settings)
            _replace(file, documents)
        return documents

    def remove(self) -> None:
        """Forget all parts."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _documents(self, file: Path) -> Documents:
        documents = _read(file)
        is_valid = isinstance(documents, list) and all(
            isinstance(row, list)
            and row
            and all(type(token) is int and token >= 0 for token in row)
            for row in documents
        )
        if not is_valid:
            raise WakefulError(f"{file} is damaged: delete it, and the same command writes it anew")
        return documents  # pyright: ignore[reportReturnType]


def prepare_samples(
    folder: Path,
    write: Callable[[int], Documents],
    *,
    tokenizer: Tokenizer,
    name: str,
    settings: dict[str, Any],
    neutral: Mapping[str, Any] = MappingProxyType({}),
    ends: Container[int],
    common: int = 0,
    progress: OnProgress = ignore_progress,
) -> PreparedData:
    """Return the prepared data of what `write` gives, part for part, or what is there already.

    `settings` are all that decides it, among them `tokens`, how many there shall be at least (the
    last document is whole), `validation_fraction` and `seed`; `neutral` are the values of those
    that a folder begun by an earlier version lacks. Documents go to either side as
    `prepare` divides them. One that ends with none of `ends` was cut off, which `data.json` counts.
    `common` tokens begin every document.

    Raises:
        WakefulError: the folder holds something else, the disk is full, or what is written is
            empty, or the same over and over.
    """
    existing = existing_data(folder, settings, neutral)
    if existing is not None:
        return existing
    parts, target = Parts(folder, settings, neutral), settings["tokens"]
    documents: Documents = []
    size = cut = empty = 0
    for number in itertools.count():
        part = parts.part(number, write)
        empty = 0 if part else empty + settings["batch_size"]
        if empty >= _MOST_EMPTY:
            raise WakefulError(
                f"{name} ended {empty} documents in a row before their first token: give it "
                "prompts, or leave out its chat template"
            )
        for document in part:
            if size < target:
                cut += document[-1] not in ends
                is_complete = document[-1] == tokenizer.end_of_text
                documents.append(document if is_complete else [*document, tokenizer.end_of_text])
                size += len(documents[-1])
        progress(min(size, target), target)
        if size >= target:
            break
    with building_beside(folder) as building:
        info = _write_samples(
            building, documents, tokenizer, name=name, settings=settings, common=common
        )
        info["sampled"] = {"documents": len(documents), "cut": cut}
        move_in(building, folder, info)
    parts.remove()
    return PreparedData.open(folder)


def _write_samples(
    building: Path,
    documents: Documents,
    tokenizer: Tokenizer,
    *,
    name: str,
    settings: dict[str, Any],
    common: int,
) -> dict[str, Any]:
    """Write all files but `data.json`; return what that says."""
    tokenizer.save(building)
    dtype = token_dtype(tokenizer.vocab_size)
    rows = [np.array(document, dtype) for document in documents]
    corpus_hash = hashlib.sha256()
    digests: list[bytes] = []
    for row in rows:
        corpus_hash.update(digest := hashlib.sha256(row.tobytes()).digest())
        digests.append(digest[: DIGEST.itemsize])
    fraction, seed = settings["validation_fraction"], settings["seed"]
    num_bytes = np.array([len(tokenizer.decode(row.tolist()).encode()) for row in rows])
    every = np.frombuffer(b"".join(digests), DIGEST)
    is_validation = held_out(every, num_bytes, fraction=fraction, seed=seed)
    if is_validation is None:
        raise _only_copies_error(name)
    sides = [
        (itertools.compress(rows, side), int(num_bytes[side].sum()))
        for side in (~is_validation, is_validation)
    ]
    info = write_splits(
        building,
        tokenizer,
        dict(zip(SPLITS, sides, strict=True)),
        source=[f"samples of {name}"],
        validation_source=[],
        corpora_sha256=[corpus_hash.hexdigest()],
        settings=settings,
        split_rule=f"SHA-256 of the tokens, seed {seed}, fraction {fraction}",
    )
    try:
        drop_overlap(PreparedData(building, info), num_bytes[is_validation], common=common)
    except NothingHeldOut:
        raise _only_copies_error(name) from None
    return info


def _only_copies_error(name: str) -> WakefulError:
    return WakefulError(
        f"{name} wrote the same over and over, so that nothing is left for validation: raise the "
        "temperature or the number of tokens, or give it more prompts"
    )


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _replace(file: Path, value: object) -> None:
    part = part_beside(file)
    part.write_text(json.dumps(value), encoding="utf-8")
    part.replace(file)
