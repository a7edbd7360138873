"""Documents, and files read as documents.

Files may come from anywhere: nothing here unpickles, and whatever is wrong with one is reported
by file and place.
"""

import contextlib
import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wakeful.data.parquet_header import fault_in_parquet
from wakeful.errors import WakefulError, first_line
from wakeful.plain_text import decoded

if TYPE_CHECKING:
    import polars

JSON_LINES_ENDINGS = frozenset({".jsonl", ".ndjson"})
JSON_ENDINGS = JSON_LINES_ENDINGS | {".json"}
PARQUET_ENDINGS = frozenset({".parquet"})
TABLES = {".csv": ",", ".tsv": "\t"}
"""Endings of tables in text, and what stands between their columns."""
MAX_LINE_BYTES = 256 * 2**20  # a JSON line; parsing takes several times as much memory
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
    """Return the documents of one file; its ending says of which kind it is.

    A `.json` file holds rows where it is an array of objects or has an object a line, and is text
    otherwise.

    Raises:
        WakefulError: the file cannot be read, is not UTF-8, or a row has no text.
    """
    ending = path.suffix.lower()
    with reading(path):
        if ending in PARQUET_ENDINGS:
            yield from _read_parquet(name, path, text_field)
        elif ending in TABLES:
            yield from _read_table(name, path, text_field, TABLES[ending])
        elif ending in JSON_ENDINGS and _begins_array(path):
            yield from _read_json_array(name, path, text_field)
        elif ending in JSON_LINES_ENDINGS or (ending == ".json" and _holds_lines(path, text_field)):
            yield from _read_json_lines(name, path, text_field)
        else:
            yield Document(name, decoded(path.read_bytes(), path))


def reading(path: str | Path) -> contextlib.AbstractContextManager[None]:
    """Turn what the operating system says against reading a path into a `WakefulError`."""
    return os_errors(f"cannot read {path}", "check the path and its permissions")


@contextlib.contextmanager
def os_errors(what: str, cure: str = "") -> Iterator[None]:
    """Turn an error of the operating system into a `WakefulError`: `what`, the reason, the cure."""
    try:
        yield
    except OSError as error:
        parts = (what, str(error.strerror or error), cure)
        raise WakefulError(": ".join(filter(None, parts))) from error


def _read_json_lines(name: str, path: Path, text_field: str) -> Iterator[Document]:
    offset = 0
    with path.open("rb") as lines:
        whole = iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(whole, start=1):
            if len(line) > MAX_LINE_BYTES:
                raise WakefulError(
                    f"{path}, line {number}: longer than {MAX_LINE_BYTES // 2**20} MiB: "
                    "JSON lines hold one object a line; split the line or pass a text file"
                )
            text = decoded(line, path, offset=offset)
            offset += len(line)
            if text.strip():
                place = f"{path}, line {number}"
                yield Document(
                    f"{name}:{number}", _text_of(parsed_json(text, place), place, text_field)
                )


def _begins_array(path: Path) -> bool:
    """Return whether a JSON file is an array of objects."""
    with path.open("rb") as file:
        return _ARRAY.match(file.read(4096)) is not None


def _holds_lines(path: Path, text_field: str) -> bool:
    """Return whether a file has a JSON object a line; one alone may be any object in a line."""
    with path.open("rb") as file:
        lines = list(itertools.islice(filter(bytes.strip, file), 2))
    try:
        row = json.loads(lines[0]) if lines else None
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and (len(lines) == 2 or text_field in row)


def _read_json_array(name: str, path: Path, text_field: str) -> Iterator[Document]:
    if path.stat().st_size > MAX_LINE_BYTES:
        lines = shlex.quote(str(path.with_suffix(".jsonl")))
        raise WakefulError(
            f"{path}: an array of more than {MAX_LINE_BYTES // 2**20} MiB: write an object a line "
            f"(jq -c '.[]' {shlex.quote(str(path))} > {lines})"
        )
    for number, row in enumerate(parsed_json(decoded(path.read_bytes(), path), str(path))):
        yield Document(f"{name}:{number}", _text_of(row, f"{path}, row {number}", text_field))


def parsed_json(text: str, place: str) -> Any:
    """Return the value of a JSON text that stands at a place, or raise `WakefulError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too large or too deep"
        raise WakefulError(f"{place}: not JSON ({reason}): mend it or leave it out") from error


def _text_of(row: object, place: str, text_field: str) -> str:
    if not isinstance(row, dict):
        raise WakefulError(
            f'{place}: a JSON {type(row).__name__}, not an object: write {{"{text_field}": ...}}'
        )
    if text_field not in row:
        raise without(text_field, place, sorted(row), "field")
    text = row[text_field]
    # A null counts as empty text, like one in a Parquet column.
    return "" if text is None else checked_text(text, place, text_field)


def without(name: str, place: str, there: Iterable[str], kind: str = "column") -> WakefulError:
    """Return the error that rows have no such field, and which they have."""
    names = ", ".join(map(repr, itertools.islice(there, 8))) or "none"
    return WakefulError(
        f"{place}: no {kind} {name!r} ({kind}s: {names[:200]}): name the one with the text"
    )


def checked_text(value: object, place: str, text_field: str) -> str:
    """Return `value`, which must be text that UTF-8 can hold; an error names `place`."""
    if not isinstance(value, str):
        raise WakefulError(
            f"{place}: field {text_field!r} holds {type(value).__name__}, not text: "
            "name the field with the text"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON may spell half a character: "\ud800"
        raise WakefulError(
            f"{place}: field {text_field!r} has half a surrogate pair at character "
            f"{error.start}, which is not Unicode text: mend or remove it"
        ) from error
    return value


def _read_parquet(name: str, path: Path, text_field: str) -> Iterator[Document]:
    import polars  # noqa: PLC0415 - only who reads Parquet waits for it

    fault = fault_in_parquet(path)
    if fault:
        raise WakefulError(f"{path}: not a whole Parquet file ({fault}): fetch it again")
    try:
        table = polars.scan_parquet(path, glob=False, hive_partitioning=False)
        schema = table.collect_schema()
        if text_field not in schema:
            raise without(text_field, str(path), schema.names())
        if schema[text_field] != polars.String:
            raise WakefulError(
                f"{path}: column {text_field!r} holds {schema[text_field]}, not text: "
                "name the column with the text"
            )
        for row, text in enumerate(_column(table.select(text_field))):
            yield Document(f"{name}:{row}", text or "")
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException) as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise WakefulError(
            f"{path}: not a whole Parquet file ({reason}): fetch it again"
        ) from error


def _read_table(name: str, path: Path, text_field: str, separator: str) -> Iterator[Document]:
    import polars  # noqa: PLC0415 - only who reads tables waits for it

    try:
        table = polars.scan_csv(path, separator=separator, infer_schema=False, glob=False)
        columns = table.collect_schema().names()
        if text_field not in columns:
            raise WakefulError(
                f"{without(text_field, str(path), columns)} (--data.text_field), or the file with "
                "the ending .txt to read it as it is"
            )
        for row, text in enumerate(table.select(text_field).collect().to_series(0)):
            yield Document(f"{name}:{row}", text or "")
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException) as error:
        raise WakefulError(
            f"{path}: not a table in UTF-8 ({first_line(error)[:200]}): mend it, or give it the "
            "ending .txt to read it as it is"
        ) from error


def _column(table: "polars.LazyFrame") -> Iterator[str | None]:
    # Slices skip whole pages, so their cost does not grow, and a reader may stop at any of them.
    start = 0
    while len(batch := table.slice(start, ROWS_AT_A_TIME).collect()):
        yield from batch.to_series(0)
        start += len(batch)
