"""The counts and sizes in a Parquet file, checked against the file before it is read.

polars (2.1.0) allocates by what a page's header says: where one byte of it makes a count negative
or huge, `read_parquet` aborts the process (SIGABRT in Rust's `handle_alloc_error`), which nothing
can catch; of 29,000 files with one number changed, ten did. It also unpacks as many rows as the
footer announces: 20,000,000 equal ones in a file of less than a megabyte.
Headers are Thrift structures in the compact protocol: fields by number, each with its type.
"""

import mmap
from pathlib import Path
from typing import Any

_MAGIC = b"PAR1"
_DEEPEST = 24
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_HEADER_OF = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}
"""The field of a page's header that holds what is special to its type."""


class _Unsound(Exception):
    """The file contradicts itself."""


def fault_in_parquet(path: Path, *, most_rows: int = 2**62) -> str:
    """Return the fault of a Parquet file in a few words; "" where it has none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check(data, most_rows)
    except ValueError:  # an empty file cannot be mapped
        return "it is empty"
    except _Unsound as error:
        return str(error)
    return ""


def _check(data: mmap.mmap, most_rows: int) -> None:
    size = len(data)
    if size < 12 or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        raise _Unsound("it does not begin and end as Parquet does: it is cut off or damaged")
    length = int.from_bytes(data[size - 8 : size - 4], "little")
    if length > size - 12:
        raise _Unsound("its footer is longer than the file")
    end = size - 8 - length
    footer = _Reader(data, end, size - 8).structure()
    rows, groups = _count(footer, 3), footer.get(4, [])
    if rows > most_rows:
        raise _Unsound(f"it has {rows:,} rows, and at most {most_rows:,} are read")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise _Unsound("its footer has no row groups")
    if sum(_count(group, 3) for group in groups) != rows:
        raise _Unsound("its row groups do not add up to its rows")
    for group in groups:
        columns = group.get(1)
        for column in columns if isinstance(columns, list) else [None]:
            if not isinstance(column, dict) or 1 in column:  # 1: the name of another file
                raise _Unsound("a column lies in no place of this file")
            chunk = column.get(3)
            if not isinstance(chunk, dict):
                raise _Unsound("a column has no description")
            _check_chunk(data, chunk, _count(group, 3), end)


def _check_chunk(data: mmap.mmap, chunk: dict[int, Any], rows: int, end: int) -> None:
    """Go over the pages of a column: each lies within it, and their values add up."""
    values, first = _count(chunk, 5), _count(chunk, 9)
    start = min(first, _count(chunk, 11)) if chunk.get(11) else first
    stop = start + _count(chunk, 7)
    if start < 4 or stop > end or values < rows:
        raise _Unsound("a column does not lie within the file, or has too few values")
    found, place = 0, start
    while place < stop:
        reader = _Reader(data, place, stop)
        page = reader.structure()
        kind, count = _count(page, 1), 0
        if kind in _HEADER_OF:
            special = page.get(_HEADER_OF[kind])
            if not isinstance(special, dict):
                raise _Unsound("a page has no header of its type")
            count = _count(special, 1)
            if kind == _DATA_V2:
                levels = _count(special, 5) + _count(special, 6)
                if levels > min(_count(page, 2), _count(page, 3)) or _count(special, 2) > count:
                    raise _Unsound("a page is shorter than its levels")
        _count(page, 2)
        place = reader.place + _count(page, 3)
        found += count if kind != _DICTIONARY else 0
    if place != stop or found != values:
        raise _Unsound("a column's pages do not add up to it")


def _count(table: dict[int, Any], field: int) -> int:
    value = table.get(field)
    if type(value) is not int or not 0 <= value < 2**62:
        raise _Unsound("a count or a size is missing or negative")
    return value


class _Reader:
    """Thrift's compact protocol between two places of the file."""

    def __init__(self, data: mmap.mmap, place: int, end: int) -> None:
        self.data, self.place, self.end = data, place, end

    def structure(self, depth: int = 0) -> dict[int, Any]:
        """Read a structure as a table from field numbers to values."""
        fields: dict[int, Any] = {}
        number = 0
        while header := self._byte():
            step, kind = header >> 4, header & 15
            number = number + step if step else self._signed()
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _DEEPEST:
            raise _Unsound("its headers are nested too deeply")
        if kind <= 8:
            return self._plain(kind)
        if kind in (9, 10):
            header = self._byte()
            size = header >> 4 if header >> 4 < 15 else self._unsigned()
            self._room(size)  # an item takes a byte or more
            return [self._value(header & 15, depth + 1) for _ in range(size)]
        if kind == 11:
            size = self._unsigned()
            self._room(size)
            kinds = self._byte() if size else 0
            return [[self._value(k, depth + 1) for k in (kinds >> 4, kinds & 15)]
                    for _ in range(size)]  # fmt: skip
        if kind == 12:
            return self.structure(depth + 1)
        raise _Unsound(f"its headers have a field of the unknown type {kind}")

    def _plain(self, kind: int) -> Any:
        if kind <= 3:
            return self._byte()
        if kind <= 6:
            return self._signed()
        return self._take(8 if kind == 7 else self._unsigned())

    def _room(self, count: int) -> None:
        if count > self.end - self.place:
            raise _Unsound("its headers announce more than the file has")

    def _take(self, count: int) -> bytes:
        self._room(count)
        self.place += count
        return self.data[self.place - count : self.place]

    def _byte(self) -> int:
        return self._take(1)[0]

    def _unsigned(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise _Unsound("its headers have a number of more than 64 bits")

    def _signed(self) -> int:
        number = self._unsigned()
        return (number >> 1) ^ -(number & 1)
