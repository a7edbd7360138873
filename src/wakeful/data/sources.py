"""Sources of text: files, folders, globs, Hugging Face datasets, the standard library.

A source is one string, or a list of them read one after another:

    "python-stdlib"                   the running Python's own library (the default corpus)
    "python-stdlib:email/*"           those of its files whose path matches
    "notes.txt", "texts/", "d/*.md"   a file, a folder with all below it, a glob
    "hf:owner/name[:config][:split]"  a dataset on the Hugging Face hub
    "hf:...?meta.set=Books"           those of its rows in which a field has this value
"""

import fnmatch
import glob
import hashlib
import itertools
import logging
import math
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from wakeful.data.readers import (
    JSON_LINES_ENDINGS,
    PARQUET_ENDINGS,
    Document,
    read_file,
    reading,
    row_text,
    stream_file,
)
from wakeful.data.tokens import is_prepared
from wakeful.errors import WakefulError, did_you_mean, did_you_mean_path, one_line
from wakeful.paths import expand_home
from wakeful.terminal.plain_text import PACKED_ENDINGS
from wakeful.variants import variants_by_name

PYTHON_STDLIB = "python-stdlib"
MIXTURE = "mixture"
"""Prefix of an expression of several sources; see `data.mixture`."""
HUB_PREFIX = "hf:"
HUB_SPLITS = frozenset({"train", "validation", "valid", "dev", "test"})

# What is taken from a folder, which may hold pictures and archives too. A file named by itself,
# or by a glob, is read as text whatever its ending.
_ENDINGS = (
    ".txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .csv .tsv .log "
    ".py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .js .mjs .ts .tsx .jsx .css .rb .php .pl "
    ".lua .r .jl .scala .swift .cs .hs .ml .lean .sh .sql .json .yaml .yml .toml .ini .cfg"
)
FOLDER_ENDINGS = frozenset(_ENDINGS.split()) | JSON_LINES_ENDINGS | PARQUET_ENDINGS | PACKED_ENDINGS

# Left out of the standard library: tests, ensurepip's wheels, what is installed beside it, and
# what the machine that built Python wrote, which is different everywhere.
_NOT_LIBRARY = frozenset({
    "__pycache__", "_bundled", "dist-packages", "idle_test", "lib-dynload", "site-packages",
    "test", "tests",
})  # fmt: skip
_GENERATED_FOLDER, _GENERATED_FILE = "config-", "_sysconfigdata"

_log = logging.getLogger(__name__)
_FEW = 5
"""Files that are named of those that are not read."""
_CHARACTERS_A_TOKEN = 64
"""Of a beginning, read at first; a tokenizer whose tokens are longer gets more."""


def read_documents(source: str | Sequence[str], *, text_field: str = "text") -> Iterator[Document]:
    """Return the documents of `source`, in an order that is the same on every reading.

    A text file is one document, as is each line of a JSON lines file and each row of a Parquet
    file or a dataset, whose `text_field` holds the text. Empty documents are passed over. One
    text file is held in memory at a time; everything else streams.

    Raises:
        WakefulError: there is no such file, a file cannot be read or is not UTF-8, a row has no
            text, or a source holds no text at all.
    """
    for single in single_sources(source):
        read = _read_one(single, text_field)
        documents = (document for document in read if document.text and not document.text.isspace())
        first = next(documents, None)
        if first is None:
            raise WakefulError(
                f"{single} holds no text: it is empty; pass a source with text in it"
            )
        yield from itertools.chain([first], documents)


def single_sources(source: str | Sequence[str]) -> list[str]:
    """Return `source` as a list of single sources, or raise `WakefulError` if it names none."""
    sources = [source] if isinstance(source, str) else [str(path) for path in source]
    if not sources or not all(path.strip() for path in sources):
        raise WakefulError(
            f"no source given: name a file, a folder, hf:owner/name or {PYTHON_STDLIB}"
        )
    return sources


def source_manifest(source: str | Sequence[str]) -> str:
    """Return a hash that changes when a file of `source` does, without reading the files.

    SHA-256 over every file's path, size and time of change. A dataset on the hub is listed
    with its name alone, so a later version of it is not noticed.
    """
    lines = hashlib.sha256()
    for single in single_sources(source):
        lines.update(f"source\0{single if single.startswith(HUB_PREFIX) else ''}\0".encode())
        for name, path in [] if single.startswith(HUB_PREFIX) else _files(single):
            with reading(path):
                stat = path.stat()
            line = f"{name}\0{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
            lines.update(line.encode("utf-8", "surrogateescape"))
    return lines.hexdigest()


def _read_one(source: str, text_field: str) -> Iterator[Document]:
    if source.startswith(HUB_PREFIX):
        yield from read_hub(source, text_field=text_field)
        return
    files, folder = _files(source), expand_home(source)
    if os.path.isdir(folder) and not _is_stdlib(source):
        _tell_of_others(folder, {name for name, _ in files})
    for name, path in files:
        if _is_stdlib(source):
            yield Document(name, read_python(path) or "")
        else:
            yield from read_file(name, path, text_field=text_field)


def _files(source: str) -> list[tuple[str, Path]]:
    """Return the files of a local source as (name relative to the source, path), sorted by name."""
    with reading(source[:200]):  # a folder that may not be entered, a path that is too long
        if not _is_stdlib(source):
            return _find(source)
        pattern = source.partition(":")[2] or "*"
        matches = [file for file in stdlib_files() if fnmatch.fnmatchcase(file[0], pattern)]
        if not matches:
            raise WakefulError(f"no file of the standard library matches {pattern}")
        return matches


def _is_stdlib(source: str) -> bool:
    return source.partition(":")[0] == PYTHON_STDLIB


def _find(source: str) -> list[tuple[str, Path]]:
    path = expand_home(source)
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        if is_prepared(path):
            raise WakefulError(
                f"{path} holds tokens that wakeful data prepare wrote, and text is needed here: "
                "name the text itself"
            )
        files = _files_below(
            path,
            lambda folder: _is_visible(folder.name) and not is_prepared(folder),
            lambda name: Path(name).suffix.lower() in FOLDER_ENDINGS and _is_visible(name),
        )
        if not files:
            raise WakefulError(
                f"no text files in {path} (.txt, .md, .py, .jsonl, .parquet, ...): "
                "pass a file by its name, or a glob, to read it whatever its ending"
            )
        return files
    if path.exists():
        raise WakefulError(f"{source} is neither a file nor a folder: pass one of these")
    tasks = variants_by_name("data.tasks")
    if source.partition("(")[0].strip() in tasks:
        raise WakefulError(
            f"{source} is a task, whose tokens are drawn, and text is needed here: name a file, a "
            f"folder, hf:owner/name or {PYTHON_STDLIB}"
        )
    if not glob.has_magic(source):
        hint = did_you_mean(source, [PYTHON_STDLIB, *tasks]) or did_you_mean_path(source)
        raise WakefulError(
            f"no such file or folder: {source}{hint}: check the path, or use {PYTHON_STDLIB}"
        )
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
    matches = [match for match in matches if match.is_file()]
    if not matches:
        raise WakefulError(f"no file matches {source}: check the pattern")
    fixed = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts[:-1]))
    return sorted((Path(os.path.relpath(match, fixed)).as_posix(), match) for match in matches)


def _is_visible(name: str) -> bool:
    """Return whether a folder shows what is called so, as shells and globs have it."""
    return not name.startswith(".")


def _tell_of_others(folder: Path, read: set[str]) -> None:
    """Say which files of a folder are no text; a folder of pictures is not at fault for them."""
    unread = [
        name for name, _ in _files_below(folder, lambda below: _is_visible(below.name), _is_visible)
    ]
    unread = [name for name in unread if name not in read]
    if unread:
        few = ", ".join(unread[:_FEW]) + (", ..." if len(unread) > _FEW else "")
        _log.warning(
            one_line(
                f"{folder}: {len(unread)} of its files are not read, since their endings name no "
                f"text or their folder holds prepared data: {few}"
            )
        )


def stdlib_files() -> list[tuple[str, Path]]:
    """Return the running Python's own `.py` files as (relative POSIX path, path), without tests.

    Raises:
        WakefulError: this Python keeps no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = _files_below(
        root,
        lambda folder: (
            folder.name not in _NOT_LIBRARY and not folder.name.startswith(_GENERATED_FOLDER)
        ),
        lambda name: name.endswith(".py") and not name.startswith(_GENERATED_FILE),
    )
    if not files:
        raise WakefulError(
            f"this Python keeps no standard library sources in {root}: pass a file or a folder"
        )
    return files


def _files_below(
    root: Path, is_wanted_folder: Callable[[Path], bool], is_wanted_file: Callable[[str], bool]
) -> list[tuple[str, Path]]:
    """Return the files below a folder whose folders and own names are wanted, sorted."""
    files: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [name for name in folders if is_wanted_folder(Path(folder, name))]
        paths = [Path(folder, name) for name in filter(is_wanted_file, names)]
        files += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(files)


def _raise(error: OSError) -> None:
    raise error


def read_python(path: Path) -> str | None:
    """Return a Python file's text in its declared encoding (PEP 263), or None if it has none.

    Newlines become `\\n`, as `tokenize.open` has it. A file that does not decode is left out
    everywhere alike, since the declaration is in the file.

    Raises:
        WakefulError: the file cannot be read.
    """
    try:
        with reading(path), tokenize.open(path) as file:
            text = file.read()
        text.encode("utf-8")
    except (SyntaxError, UnicodeError, LookupError):
        return None
    return text


def parse_hub(source: str) -> tuple[str, str | None, str]:
    """Return `hf:owner/name[:config][:split]` as (name, config or None, split); refuse all else.

    The split is "train" unless given. Where only one of the two is there it is a split if it is
    called like one (train, validation, valid, dev, test), and a config otherwise;
    `hf:owner/name::split` says split whatever its name.
    """
    name, *rest = source.removeprefix(HUB_PREFIX).split(":")
    if not name or len(rest) > 2:
        raise WakefulError(f"{source!r} is not a dataset: write hf:owner/name[:config][:split]")
    if len(rest) == 1 and rest[0] in HUB_SPLITS:
        rest = ["", *rest]
    config, split = [*rest, "", ""][:2]
    return name, config or None, split or "train"


def _parse_filter(source: str) -> tuple[str, str, str]:
    """Return a dataset without its filter, and the filter's field and value, empty without one."""
    plain, mark, filtering = source.partition("?")
    field, equals, value = filtering.partition("=")
    if mark and not (field and equals):
        raise WakefulError(f"{source!r} does not filter: write hf:owner/name?FIELD=VALUE")
    return plain, field, value


def _field(row: Mapping[str, object], name: str) -> object:
    """Return a field of a row, one of a table in it by its dotted name; None where it is not."""
    value: object = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def read_hub(source: str, *, text_field: str) -> Iterator[Document]:
    """Return the documents of a dataset, streamed.

    Raises:
        WakefulError: the dataset, its text column or the hub cannot be reached.
    """
    plain, field, value = _parse_filter(source)
    name, config, split = parse_hub(plain)
    remedy = "; check its name and the connection, or download it and pass its files"
    label = ":".join([name, config or "", split])
    for number, row in enumerate(stream_file(plain, remedy, name, config, split=split)):
        if not field or str(_field(row, field)) == value:
            text = row_text(row, f"{plain}, row {number}", text_field)
            yield Document(f"{label}:{number}", text)


class Beginning:
    """A text's beginning, read on where somebody's tokens are longer than most."""

    def __init__(self, text: str, more: Callable[[], str | None] = lambda: None) -> None:
        self.text = text
        """All that has been read."""
        self._more = more

    def tokens(self, encode: Callable[[str], Sequence[int]], count: int) -> list[int]:
        """Return the first `count` tokens of the text, or all of them where it has no more.

        A token that the end of what was read may have cut is not among them.
        """
        return list(encode(self.text_of(encode, count)))[:count]

    def text_of(self, encode: Callable[[str], Sequence[int]], count: int) -> str:
        """Return a beginning of the text with more than `count` tokens, or all of it; 0 is all."""
        size = _CHARACTERS_A_TOKEN * count or math.inf
        while self.reach(size):
            beginning = self.text[: int(size)]
            if len(encode(beginning)) > count:
                return beginning
            size *= 2
        return self.text

    def reach(self, size: float) -> bool:
        """Read until there are `size` characters, and no further; return whether there are."""
        while len(self.text) < size:
            more = self._more()
            if more is None:
                return False
            self.text += "\n" + more
        return True


def beginning_of(source: str, num_tokens: int) -> Beginning:
    """Return a source's beginning, read as far as `num_tokens` tokens mostly need; 0 is all of it.

    Documents stand one to a line. Raises what `read_documents` raises, here and as it reads on.
    """
    documents = (document.text for document in read_documents(source))
    beginning = Beginning(next(documents, ""), lambda: next(documents, None))
    beginning.reach(_CHARACTERS_A_TOKEN * num_tokens or math.inf)
    return beginning
