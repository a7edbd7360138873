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
    convert_read_errors,
    read_file,
    row_text,
    stream_file,
)
from wakeful.data.tokens import is_prepared
from wakeful.errors import WakefulError, did_you_mean, did_you_mean_path, one_line
from wakeful.paths import expand_home

PYTHON_STDLIB = "python-stdlib"
MIXTURE = "mixture"
"""Prefix of an expression of several sources; see `data.mixture`."""
TASK = "backcopy"
"""Name of the task that replaces a text; see `data.tasks`."""
HUB_PREFIX = "hf:"
HUB_SPLITS = frozenset({"train", "validation", "valid", "dev", "test"})

# Extensions of the files that are read from a folder, which may hold pictures and archives too. A
# file that is named itself, or by a glob, is read as text whatever its extension.
_ENDINGS = (
    ".txt .text .md .markdown .rst .tex .org .adoc .html .htm .xml .csv .tsv .log "
    ".py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .js .mjs .ts .tsx .jsx .css .rb .php .pl "
    ".lua .r .jl .scala .swift .cs .hs .ml .lean .sh .sql .json .yaml .yml .toml .ini .cfg"
)
FOLDER_ENDINGS = frozenset(_ENDINGS.split()) | JSON_LINES_ENDINGS | PARQUET_ENDINGS

# Left out of the standard library: tests, ensurepip's wheels, what is installed beside it, and
# what the machine that built Python wrote, which is different everywhere.
_NOT_LIBRARY = frozenset({
    "__pycache__", "_bundled", "dist-packages", "idle_test", "lib-dynload", "site-packages",
    "test", "tests",
})  # fmt: skip
_GENERATED_FOLDER, _GENERATED_FILE = "config-", "_sysconfigdata"

_log = logging.getLogger(__name__)
_FEW = 5
"""Number of unread files that a warning names."""
_CHARACTERS_PER_TOKEN = 64
"""Characters of text read at first per requested token; more are read if tokens are longer."""


def read_documents(source: str | Sequence[str], *, text_field: str = "text") -> Iterator[Document]:
    """Yield the documents of a source, or of several, in an order that is always the same.

    A text file is one document. So is each line of a JSON lines file and each row of a Parquet file
    or a dataset, with its text in the field `text_field`. Empty documents are skipped. One text
    file at a time is in memory; everything else is streamed.

    Raises:
        WakefulError: there is no such file, a file cannot be read or is not UTF-8, a row has no
            text, or a source holds no text at all.
    """
    for single in single_sources(source):
        documents = (
            document for document in _read_source(single, text_field) if document.text.strip()
        )
        first = next(documents, None)
        if first is None:
            raise WakefulError(
                f"{single} holds no text: it is empty; pass a source with text in it"
            )
        yield from itertools.chain([first], documents)


def single_sources(source: str | Sequence[str]) -> list[str]:
    """Return one source, or several, as a list; raise `WakefulError` for none or a blank one."""
    sources = [source] if isinstance(source, str) else [str(path) for path in source]
    if not sources or not all(path.strip() for path in sources):
        raise WakefulError(
            f"no source given: name a file, a folder, hf:owner/name or {PYTHON_STDLIB}"
        )
    return sources


def source_manifest(source: str | Sequence[str]) -> str:
    """Return a hash of a source's files that changes when one of them does; no file is read.

    It is the SHA-256 of every file's path, size and time of change. For a dataset on the hub only
    its name is hashed, so a later version of the dataset is not noticed.
    """
    digest = hashlib.sha256()
    for single in single_sources(source):
        if single.startswith(HUB_PREFIX):
            digest.update(f"source\0{single}\0".encode())
            continue
        digest.update(b"source\0\0")
        for name, path in _list_files(single):
            with convert_read_errors(path):
                stat = path.stat()
            line = f"{name}\0{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _read_source(source: str, text_field: str) -> Iterator[Document]:
    """Yield the documents of one source: a dataset of the hub, the standard library, or files.

    For a folder, a warning names files that are not read.
    """
    if source.startswith(HUB_PREFIX):
        yield from read_hub(source, text_field=text_field)
        return
    files, folder = _list_files(source), expand_home(source)
    if os.path.isdir(folder) and not _is_stdlib(source):
        _warn_of_unread_files(folder, {name for name, _ in files})
    for name, path in files:
        if _is_stdlib(source):
            # A file that cannot be decoded becomes an empty document, which the caller skips.
            yield Document(name, read_python(path) or "")
        else:
            yield from read_file(name, path, text_field=text_field)


def _list_files(source: str) -> list[tuple[str, Path]]:
    """Return the files of a local source as (name relative to the source, path), sorted by name.

    Raises:
        WakefulError: the source names no file, a folder may not be entered, or a path is too long.
    """
    with convert_read_errors(source[:200]):  # the error quotes it: it may be too long for a path
        if not _is_stdlib(source):
            return _find_files(source)
        pattern = source.partition(":")[2] or "*"  # python-stdlib:PATTERN
        matches = [file for file in stdlib_files() if fnmatch.fnmatchcase(file[0], pattern)]
        if not matches:
            raise WakefulError(f"no file of the standard library matches {pattern}")
        return matches


def _is_stdlib(source: str) -> bool:
    return source.partition(":")[0] == PYTHON_STDLIB


def _find_files(source: str) -> list[tuple[str, Path]]:
    """Return the files that a path or a glob names, as (name relative to the source, path).

    A folder is read with all that lies below it, except hidden files, folders of prepared tokens,
    and files whose ending names no text.

    Raises:
        WakefulError: it names no file, a folder without text files, prepared tokens or a task.
    """
    path = expand_home(source)
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        if is_prepared(path):
            raise WakefulError(
                f"{path} holds tokens that wakeful prepare wrote, and text is needed here: "
                "name the text itself"
            )
        files = _walk_files(
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
    if source.partition("(")[0].strip() == TASK:
        raise WakefulError(
            f"{source} is a task, whose tokens are drawn, and text is needed here: name a file, a "
            f"folder, hf:owner/name or {PYTHON_STDLIB}"
        )
    if not glob.has_magic(source):
        name = source.partition("(")[0]  # of a task with options
        hint = did_you_mean(name, [PYTHON_STDLIB, TASK]) or did_you_mean_path(source)
        raise WakefulError(
            f"no such file or folder: {source}{hint}: check the path, or use {PYTHON_STDLIB}"
        )
    paths = [Path(match) for match in glob.glob(str(path), recursive=True)]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise WakefulError(f"no file matches {source}: check the pattern")
    # Names are relative to the last folder before the first wildcard.
    root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts[:-1]))
    return sorted((Path(os.path.relpath(match, root)).as_posix(), match) for match in paths)


def _is_visible(name: str) -> bool:
    """Return whether a file's name does not begin with a dot, which hides it from globs."""
    return not name.startswith(".")


def _warn_of_unread_files(folder: Path, read_names: set[str]) -> None:
    """Log a warning that names some of a folder's unread files: files that are no text or lie in a
    folder of prepared data. `read_names` are the files that are read, relative to the folder.
    """
    files = _walk_files(folder, lambda subfolder: _is_visible(subfolder.name), _is_visible)
    unread = [name for name, _ in files if name not in read_names]
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
    files = _walk_files(
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


def _walk_files(
    root: Path, is_wanted_folder: Callable[[Path], bool], is_wanted_file: Callable[[str], bool]
) -> list[tuple[str, Path]]:
    """Return the wanted files in wanted folders below a folder, sorted, as (path relative to the
    folder, path). An `OSError` of a folder that cannot be entered is raised.
    """
    files: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        # os.walk enters only the folders that stay in this list.
        folders[:] = [name for name in folders if is_wanted_folder(Path(folder, name))]
        paths = [Path(folder, name) for name in filter(is_wanted_file, names)]
        files += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(files)


def _raise(error: OSError) -> None:
    raise error


def read_python(path: Path) -> str | None:
    """Return a Python file's text, decoded by the encoding that the file itself declares (PEP 263);
    None if it cannot be decoded. Newlines become `\\n`.

    The result depends on the file alone, so it is the same on every machine.

    Raises:
        WakefulError: the file cannot be read.
    """
    try:
        with convert_read_errors(path), tokenize.open(path) as file:
            text = file.read()
        text.encode("utf-8")
    except (SyntaxError, UnicodeError, LookupError):
        return None
    return text


def parse_hub(source: str) -> tuple[str, str | None, str]:
    """Parse `hf:owner/name[:config][:split]` into (name, config or None, split).

    The default split is "train". A single word after the name is a split if it is train,
    validation, valid, dev or test, and otherwise a config. `hf:owner/name::SPLIT` names a split of
    any name.

    Raises:
        WakefulError: the source does not have this form.
    """
    name, *rest = source.removeprefix(HUB_PREFIX).split(":")
    if not name or len(rest) > 2:
        raise WakefulError(f"{source!r} is not a dataset: write hf:owner/name[:config][:split]")
    if len(rest) == 1 and rest[0] in HUB_SPLITS:  # the one word is a split, not a config
        rest = ["", *rest]
    config, split = [*rest, "", ""][:2]  # "" for what is missing
    return name, config or None, split or "train"


def _parse_filter(source: str) -> tuple[str, str, str]:
    """Split `DATASET?FIELD=VALUE` into its three parts; without a filter the last two are ""."""
    dataset, mark, condition = source.partition("?")
    field, equals, value = condition.partition("=")
    if mark and not (field and equals):
        raise WakefulError(f"{source!r} does not filter: write hf:owner/name?FIELD=VALUE")
    return dataset, field, value


def _field_value(row: Mapping[str, object], name: str) -> object:
    """Return the value of a row's field, None if there is none. A nested field has a dotted name,
    such as "meta.set".
    """
    value: object = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def read_hub(source: str, *, text_field: str) -> Iterator[Document]:
    """Stream the documents of a dataset of the Hugging Face hub: `hf:NAME[?FIELD=VALUE]`.

    Each row is a document, whose text is in the field `text_field`. With a filter, only the rows
    are read whose field FIELD, as text, equals VALUE.

    Raises:
        WakefulError: the source does not have this form, the dataset cannot be reached, or a row
            has no text.
    """
    dataset, field, value = _parse_filter(source)
    name, config, split = parse_hub(dataset)
    remedy = "; check its name and the connection, or download it and pass its files"
    label = ":".join([name, config or "", split])
    for number, row in enumerate(stream_file(dataset, remedy, name, config, split=split)):
        if not field or str(_field_value(row, field)) == value:
            text = row_text(row, f"{dataset}, row {number}", text_field)
            yield Document(f"{label}:{number}", text)


class TextBeginning:
    """The beginning of a text; more documents are read when a tokenizer needs them."""

    def __init__(self, text: str, read_next: Callable[[], str | None] = lambda: None) -> None:
        """Begin with `text`; `read_next` returns the next document, or None at the end."""
        self.text = text
        """The text that has been read."""
        self._read_next = read_next

    def tokens(self, encode: Callable[[str], Sequence[int]], count: int) -> list[int]:
        """Return the first `count` tokens of the text, or all tokens of a shorter text.

        At least one token more is encoded, so that no returned token is cut off at its end.
        """
        return list(encode(self.text_of(encode, count)))[:count]

    def text_of(self, encode: Callable[[str], Sequence[int]], count: int) -> str:
        """Return a beginning of the text that has more than `count` tokens; the whole text if it
        has no more, or if `count` is 0.
        """
        num_characters = _CHARACTERS_PER_TOKEN * count if count else math.inf
        while self.read_until(num_characters):  # ends when the text does
            beginning = self.text[: int(num_characters)]
            if len(encode(beginning)) > count:
                return beginning
            num_characters *= 2
        return self.text

    def read_until(self, num_characters: float) -> bool:
        """Read documents until the text has `num_characters`; return False where it ends before."""
        while len(self.text) < num_characters:
            document = self._read_next()
            if document is None:
                return False
            self.text += "\n" + document
        return True


def read_beginning(source: str, num_tokens: int) -> TextBeginning:
    """Read the beginning of a source: enough text for `num_tokens` tokens of most tokenizers, or
    all of it for 0. The result reads more when a tokenizer needs it.

    Documents are joined by newlines.

    Raises:
        WakefulError: as `read_documents`; so does the result when it reads more.
    """
    documents = (document.text for document in read_documents(source))
    beginning = TextBeginning(next(documents, ""), lambda: next(documents, None))
    beginning.read_until(_CHARACTERS_PER_TOKEN * num_tokens if num_tokens else math.inf)
    return beginning
