"""Documents, and files read as documents: text and JSON as they are, tables by `datasets`.

JSON lines are parsed one at a time: `datasets` reads a whole block as one table, in which a
field that comes later, or two rows of other types, are an error, and text like a date is none.
"""

import contextlib
import glob
import itertools
import json
import logging
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakeful.errors import WakefulError
from wakeful.guard import wrap_errors
from wakeful.terminal.plain_text import decode_utf8

JSON_LINES_ENDINGS = frozenset({".jsonl", ".ndjson"})
JSON_ENDINGS = JSON_LINES_ENDINGS | {".json"}
PARQUET_ENDINGS = frozenset({".parquet"})
TABLES = {".csv": ",", ".tsv": "\t"}
"""Endings of tables in text, and what stands between their columns."""
ROWS_AT_A_TIME = 4096
_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where it came from.

    `name` is relative to its source (a path inside a folder, `file.jsonl:12` for line 12,
    `file.parquet:12` for row 12), so that a corpus keeps its hash when its folder moves.
    """

    name: str
    text: str


def read_file(name: str, path: Path, *, text_field: str) -> Iterator[Document]:
    """Yield the documents of one file; its extension decides how it is read.

    A table (parquet, CSV, TSV, JSON lines) has a document per row, whose text is in the column
    `text_field`. So has a `.json` file that is an array of objects or has one object per line. Any
    other file is one document. Documents are called `name`, or `name:NUMBER` for a row.

    Raises:
        WakefulError: the file cannot be read, is not UTF-8, or a row has no text.
    """
    ending = path.suffix.lower()
    with convert_read_errors(path):
        if ending in PARQUET_ENDINGS or ending in TABLES:
            rows = _read_table(path, text_field)
        elif ending in JSON_ENDINGS and _is_json_array(path):
            rows = _read_json_array(path)
        elif ending in JSON_LINES_ENDINGS or (
            ending == ".json" and _has_json_lines(path, text_field)
        ):
            rows = read_json_lines(path)
        else:
            yield Document(name, decode_utf8(path.read_bytes(), path))
            return
        for number, location, row in rows:
            yield Document(f"{name}:{number}", row_text(row, location, text_field))


NumberedRows = Iterator[tuple[int, str, object]]
"""The number of each row, its place in words, and the row."""


def convert_read_errors(path: str | Path) -> contextlib.AbstractContextManager[None]:
    """Turn an `OSError` inside the block, raised while `path` is read, into a `WakefulError`."""
    return convert_os_errors(f"cannot read {path}", "check the path and its permissions")


@contextlib.contextmanager
def convert_os_errors(action: str, remedy: str = "") -> Iterator[None]:
    """Turn an `OSError` inside the block into a `WakefulError`: "ACTION: the reason: REMEDY"."""
    try:
        yield
    except OSError as error:
        parts = (action, str(error.strerror or error), remedy)
        raise WakefulError(": ".join(filter(None, parts))) from error


def read_json_lines(path: Path) -> NumberedRows:
    """Yield, for each line of a JSON lines file that is not blank, its number from 1, its location
    for error messages ("PATH, line 3") and its value.
    """
    offset = 0  # bytes before the line, for the error of one that is not UTF-8
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            text = decode_utf8(line, path, offset=offset)
            offset += len(line)
            if text.strip():
                location = f"{path}, line {number}"
                yield number, location, parse_json(text, location)


def _is_json_array(path: Path) -> bool:
    """Return whether a JSON file begins like an array of objects."""
    with path.open("rb") as file:
        return _ARRAY.match(file.read(4096)) is not None


def _has_json_lines(path: Path, text_field: str) -> bool:
    """Return whether a file's first line is a JSON object and more lines follow; for a file of one
    line, whether this object has the field `text_field`. Blank lines do not count.
    """
    with path.open("rb") as file:
        lines = list(itertools.islice(filter(bytes.strip, file), 2))
    try:
        row = json.loads(lines[0]) if lines else None
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and (len(lines) == 2 or text_field in row)


def _read_json_array(path: Path) -> NumberedRows:
    """Yield the number, the location and the value of each element of a JSON array in a file."""
    for number, row in enumerate(parse_json(decode_utf8(path.read_bytes(), path), str(path))):
        yield number, f"{path}, row {number}", row


def parse_json(text: str, location: str) -> Any:
    """Parse a JSON text, or raise a `WakefulError` that names its location."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too large or too deep"
        raise WakefulError(f"{location}: not JSON ({reason}): mend it or leave it out") from error


def _read_table(path: Path, text_field: str) -> NumberedRows:
    """Yield the number, the location and the value of each row of a parquet, CSV or TSV file, of
    which only the column `text_field` is read; CSV and TSV values stay strings.
    """
    file = glob.escape(str(path.absolute()))  # `datasets` expands wildcards in a path
    ending = path.suffix.lower()
    remedy = f"; name its column of text ({text_field!r} now), or fetch the file again"
    options: dict[str, Any] = {"columns": [text_field], "batch_size": ROWS_AT_A_TIME}
    if ending in TABLES:
        from datasets import Features, Value  # noqa: PLC0415 - it takes seconds to import

        remedy = (
            f"; name its column of text ({text_field!r} now), or give it the ending .txt to read "
            "it as it is"
        )
        options = {
            "features": Features({text_field: Value("string")}), "usecols": [text_field],
            "sep": TABLES[ending], "keep_default_na": False, "index_col": False,
        }  # fmt: skip
    kind = "csv" if ending in TABLES else "parquet"
    for number, row in enumerate(stream_file(str(path), remedy, kind, data_files=file, **options)):
        yield number, f"{path}, row {number}", row


def stream_file(
    description: str,
    remedy: str,
    path: str,
    name: str | None = None,
    *,
    split: str = "train",
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Yield a dataset's rows as `datasets.load_dataset` streams them; nothing stays on the disk.

    `path`, `name`, `split` and `options` are arguments of `load_dataset`.

    Raises:
        WakefulError: `datasets` cannot read it: "cannot read DESCRIPTION", the reason and `remedy`.
    """
    with wrap_errors(f"cannot read {description}", remedy):
        import datasets  # noqa: PLC0415 - it takes seconds to import

        # `datasets` would log every error before it raises it.
        logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
        with tempfile.TemporaryDirectory() as cache:
            rows: Any = datasets.load_dataset(
                path, name, split=split, streaming=True, cache_dir=cache, **options
            )
        yield from rows


def row_text(row: object, location: str, text_field: str) -> str:
    """Return the field `text_field` of a row, "" for null; `location` is for error messages.

    Raises:
        WakefulError: the row lacks the field, or the field is neither text nor null.
    """
    if not isinstance(row, dict):
        raise WakefulError(
            f'{location}: a JSON {type(row).__name__}, not an object: write {{"{text_field}": ...}}'
        )
    if text_field not in row:
        names = ", ".join(map(repr, itertools.islice(sorted(row), 8))) or "none"
        raise WakefulError(
            f"{location}: no field {text_field!r} (fields: {names[:200]}): name the one with the "
            "text"
        )
    text = row[text_field]
    return "" if text is None else check_text(text, location, text_field)


def check_text(value: object, location: str, text_field: str) -> str:
    """Return `value` if it is a string that UTF-8 can encode; otherwise raise a `WakefulError` that
    names the location and the field.
    """
    if not isinstance(value, str):
        raise WakefulError(
            f"{location}: field {text_field!r} holds {type(value).__name__}, not text: "
            "name the field with the text"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON may spell half a character: "\ud800"
        raise WakefulError(
            f"{location}: field {text_field!r} has half a surrogate pair at character "
            f"{error.start}, which is not Unicode text: mend or remove it"
        ) from error
    return value
