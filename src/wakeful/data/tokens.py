"""Prepared tokens on disk, memory-mapped: one long row of ids for training, one for validation.

A folder holds

    train.tokens, validation.tokens                 the ids, raw, little-endian uint16 or uint32;
                                                    every document is followed by end_of_text
    train.documents.npy, validation.documents.npy   where each document begins (int64, tokens)
    tokenizer.json, tokenizer_config.json           how the ids were made
    data.json                                       what is here, and the hashes to check it by
"""

import contextlib
import functools
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from wakeful.config.schema import DataConfig
from wakeful.data.base import Data
from wakeful.data.order import Tokens
from wakeful.data.readers import convert_os_errors
from wakeful.data.tokenizer import Tokenizer
from wakeful.digests import file_sha256
from wakeful.errors import WakefulError
from wakeful.guard import wrap_errors
from wakeful.paths import expand_home, temporary_path_beside

FORMAT, VERSION = "wakeful.tokens", 1
TOKEN_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, SplitName] = ("train", "validation")


@dataclass(frozen=True)
class TokenFile(Tokens):
    """The ids of one split, mapped and read only."""

    tokens: np.ndarray
    """(num_tokens,) uint16 or uint32, a memory map."""
    documents: np.ndarray
    """(num_documents,) int64: the position of each document's first token."""
    num_bytes: int
    """UTF-8 bytes of the text: for bits per byte from nats per token."""
    vocab_size: int
    end_of_text: int
    path: Path
    is_truncated: bool = False
    """The last token is read as `end_of_text`, because `truncate` has cut its document there."""

    @property
    def num_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.tokens)

    def read(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Return the `count` tokens from each start on, (starts, count) int64; past the last token
        a row continues at the first.

        The file's size is checked first: reading a memory map past the end of a file that was cut
        short kills the process.

        Raises:
            WakefulError: the file was cut short, or an id is not in the vocabulary.
        """
        with contextlib.suppress(FileNotFoundError):  # a removed file stays mapped
            size = self.path.stat().st_size
            if size < self.tokens.nbytes:
                raise _damage_error(self.path, f"{size} bytes are left of {self.tokens.nbytes}")
        rows = np.stack([self._row(int(start), count) for start in starts])
        self.check_ids(rows)
        return rows.astype(np.int64)

    def truncate(self, count: int) -> "TokenFile":
        """Return the first `count` tokens as a `TokenFile`, whose last token is read as
        end_of_text.

        Raises:
            WakefulError: the file has fewer tokens.
        """
        if count > self.num_tokens:
            raise WakefulError(
                f"data.max_tokens = {count:,} is more than the {self.num_tokens:,} "
                "training tokens: lower it"
            )
        documents = self.documents[self.documents < count]
        return replace(self, tokens=self.tokens[:count], documents=documents, is_truncated=True)

    def _row(self, start: int, count: int) -> np.ndarray:
        """Return the `count` tokens from `start` on; past the last token come the first ones."""
        if start + count < len(self.tokens):  # without the last token, which `truncate` may change
            return self.tokens[start : start + count]
        positions = np.arange(start, start + count) % len(self.tokens)
        row = self.tokens[positions]
        if self.is_truncated:
            row[positions == len(self.tokens) - 1] = self.end_of_text
        return row

    def check_ids(self, tokens: np.ndarray) -> None:
        """Raise `WakefulError` for an id that is not in the vocabulary: the file is damaged."""
        highest = int(tokens.max())
        if highest >= self.vocab_size:
            raise _damage_error(self.path, f"id {highest} of {self.vocab_size}")


@dataclass(frozen=True)
class PreparedData(Data):
    """A folder of prepared tokens whose `data.json` has been read and whose sizes agree with it."""

    folder: Path
    info: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> "PreparedData":
        """Open a prepared folder; the sizes of its files are checked.

        Raises:
            WakefulError: the folder is not a prepared one, or a file is cut or damaged.
        """
        folder = expand_home(folder)
        advice = f": delete {folder} and prepare the data again"
        with (
            wrap_errors(f"{folder / 'data.json'} is damaged", advice),
            convert_os_errors(f"cannot read {folder}", "prepare the data again"),
        ):
            prepared = cls(folder, _read_info(folder))
            for split in SPLITS:  # opened only to check them
                prepared.split(split)
        return prepared

    @property
    def prepared_source(self) -> str:
        return str(self.folder)

    @property
    def train(self) -> TokenFile:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.split("train")

    @property
    def validation(self) -> TokenFile:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.split("validation")

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tokenizer of the folder; raises `WakefulError` where it differs from `data.json`."""
        tokenizer = Tokenizer.load(self.folder)
        properties = {"vocab_size": tokenizer.vocab_size, "end_of_text": tokenizer.end_of_text}
        for name, value in properties.items():
            if self.info["tokenizer"][name] != value:
                raise _damage_error(
                    self.folder / "tokenizer.json",
                    f"its {name} is {value}, and data.json's {self.info['tokenizer'][name]}",
                )
        return tokenizer

    def is_named_by(self, source: str) -> bool:
        """Return whether `source` names this folder, and not the text that it was made of."""
        return self.folder == expand_home(source)

    def first_tokens(self, config: DataConfig, length: int) -> TokenFile:
        """Return the first `config.max_tokens` training tokens; raise `WakefulError` if these are
        fewer than `length` + 1, or more than there are.
        """
        if config.max_tokens < length + 1:
            raise WakefulError(
                f"data.max_tokens = {config.max_tokens} is less than one sequence needs: "
                f"train.length + 1 = {length + 1}"
            )
        return self.train.truncate(config.max_tokens)

    def check_config(self, config: DataConfig) -> None:
        """Raise `WakefulError` if `config` names this folder and sets a field that only preparing a
        text reads.
        """
        if not self.is_named_by(config.source):  # it names the text: its fields were used
            return
        for name in ("validation_source", "max_bytes", "keep_overlap", "tokenizer"):
            if value := getattr(config, name):
                raise WakefulError(
                    f"data.{name} = {value!r} does nothing: data.source = {config.source!r} is "
                    "prepared; leave it out, or prepare the text again"
                )

    def split(self, split: SplitName) -> TokenFile:
        """Memory-map the tokens of one split.

        Raises:
            WakefulError: no split has this name, or its files do not agree with `data.json`.
        """
        if split not in SPLITS:
            raise WakefulError(f"no split {split!r}: use one of {', '.join(SPLITS)}")
        facts, dtype = self.info["splits"][split], TOKEN_DTYPES[self.info["dtype"]]
        path, documents_path = _split_files(self.folder, split)
        num_bytes = path.stat().st_size
        if num_bytes != facts["tokens"] * dtype.itemsize:
            raise _damage_error(
                path, f"{num_bytes} bytes, not {facts['tokens']} tokens of {dtype.itemsize} bytes"
            )
        if not num_bytes:
            raise _damage_error(path, "it is empty")
        return TokenFile(
            tokens=np.memmap(path, dtype, mode="r"),
            documents=_read_document_starts(documents_path, facts),
            num_bytes=facts["bytes"],
            vocab_size=self.vocab_size,
            end_of_text=self.info["tokenizer"]["end_of_text"],
            path=path,
        )


def _split_files(folder: Path, split: SplitName) -> tuple[Path, Path]:
    """Return the files of a split: its tokens, and the positions where its documents begin."""
    return folder / f"{split}.tokens", folder / f"{split}.documents.npy"


def write_split(
    folder: Path, split: SplitName, documents: Iterable[np.ndarray], num_bytes: int
) -> dict[str, Any]:
    """Write the documents of a split, (tokens,) each, and return the facts about it for
    `data.json`. An existing split is replaced. `num_bytes` is the size of the text in UTF-8.
    """
    path, documents_path = _split_files(folder, split)
    lengths = array("q")
    new_file = temporary_path_beside(path)  # `documents` may be read from the existing file
    with new_file.open("wb") as file:
        for document in documents:
            file.write(document.tobytes())
            lengths.append(len(document))
    new_file.replace(path)
    ends = np.cumsum(lengths, dtype="<i8")
    np.save(documents_path, ends - lengths, allow_pickle=False)
    return {
        "documents": len(lengths),
        "tokens": int(ends[-1]),
        "bytes": num_bytes,
        "sha256": file_sha256(path),
        "documents_sha256": file_sha256(documents_path),
    }


def write_splits(
    folder: Path,
    tokenizer: Tokenizer,
    splits: Mapping[SplitName, tuple[Iterable[np.ndarray], int]],
    **origin: Any,
) -> dict[str, Any]:
    """Write both splits, each given as (documents, bytes of their text), and return the content of
    `data.json`, which is not written here. `origin` are its further entries, such as the source.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        **origin,
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text,
        },
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "splits": {
            name: write_split(folder, name, documents, num_bytes)
            for name, (documents, num_bytes) in splits.items()
        },
    }


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the narrowest type for the ids below `vocab_size`; its name is in `data.json`."""
    return TOKEN_DTYPES["uint16" if vocab_size <= 2**16 else "uint32"]


def is_prepared(folder: Path) -> bool:
    """Return whether `folder` has a `data.json` of prepared data; its files are not checked."""
    try:
        info = json.loads((expand_home(folder) / "data.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(info, dict) and info.get("format") == FORMAT


def open_prepared(source: str) -> PreparedData | None:
    """Open the prepared folder that a source names; None where it names something else."""
    return PreparedData.open(source) if is_prepared(Path(source)) else None


def _read_info(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `data.json`.

    Raises:
        WakefulError: the file is missing or damaged, does not describe prepared tokens, or has
            another format version.
    """
    path = folder / "data.json"
    if not path.is_file():
        raise WakefulError(f"no prepared data in {folder}: prepare it first")
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damage_error(path, "not JSON") from error
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise WakefulError(f"{path} does not describe prepared tokens: prepare the data first")
    if info.get("version") != VERSION:
        raise WakefulError(
            f"{folder} has format version {info.get('version')}, this program reads {VERSION}: "
            "prepare the data again"
        )
    return info


def _read_document_starts(path: Path, facts: dict[str, Any]) -> np.ndarray:
    """Memory-map the positions of documents' first tokens; raise `WakefulError` if they do not
    agree with `facts`, the split's entry in `data.json`.
    """
    with wrap_errors(f"{path} is damaged", f": delete {path.parent} and prepare the data again"):
        documents = np.lib.format.open_memmap(path, mode="r")  # no zip file and no object is read
    if documents.dtype != np.dtype("<i8") or documents.shape != (facts["documents"],):
        raise _damage_error(
            path, f"{documents.dtype} {documents.shape}, not int64 ({facts['documents']},)"
        )
    if not len(documents) or documents[0] != 0 or documents[-1] >= facts["tokens"]:
        raise _damage_error(path, "its documents do not lie within the tokens")
    return documents


def _damage_error(path: Path, reason: str) -> WakefulError:
    return WakefulError(
        f"{path} is damaged ({reason}): delete {path.parent} and prepare the data again"
    )


def check_free(folder: Path) -> None:
    """Raise `WakefulError` where there is something at `folder` that is not an empty folder."""
    with convert_os_errors(f"cannot use {folder}", "choose another folder"):
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise WakefulError(f"{folder} exists: choose another folder or move it away")


@contextlib.contextmanager
def temporary_folder_beside(folder: Path) -> Iterator[Path]:
    """Create a temporary folder beside `folder`, which the block fills and renames to `folder`;
    delete it after the block if it is still there.

    Raises:
        WakefulError: in place of an `OSError`, such as that of a full disk.
    """
    building = temporary_path_beside(folder)
    remedy = "free some space or choose another folder (nothing was kept)"
    try:
        with convert_os_errors(f"cannot write {folder}", remedy):
            building.mkdir(parents=True)
            yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


def publish_folder(building: Path, folder: Path, info: dict[str, Any]) -> None:
    """Write `info` as `data.json` into the temporary folder `building`, flush the folder's files to
    the disk, and rename it to `folder`. If another process has prepared `folder` meanwhile, its
    data are kept.
    """
    (building / "data.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    for path in filter(Path.is_file, building.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # or a crash could leave the name without the bytes
    try:
        building.rename(folder)
    except OSError:
        if not is_prepared(folder):
            raise
