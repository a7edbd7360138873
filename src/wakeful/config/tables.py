"""Dataclasses from and to the tables of TOML and JSON; every value is checked against its type."""

import contextlib
import dataclasses
import functools
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from wakeful.errors import WakefulError, did_you_mean, did_you_mean_path
from wakeful.terminal.plain_text import decode_utf8
from wakeful.variants.plugins import preset_folders

TomlTable = dict[str, Any]
_MAX_BYTES = 2**18
"""Largest TOML file, in bytes; a configuration has a few thousand."""
_MAX_DOTS = 200
"""Most dots in a name: the parser takes time and memory quadratic in its parts."""
_PLAIN_TYPES = frozenset({str, int, float, bool, types.NoneType})
_NUMBER_BOUND = 2**1000
"""Bound of numbers: a larger whole number has no float."""


def preset_names() -> list[str]:
    """Return the names of the presets of wakeful and of installed packages."""
    return sorted(_preset_files())


@functools.cache
def _preset_files() -> dict[str, Path]:
    """Return the files of all presets by name; wakeful's own replace others of the same name."""
    own_folder = Path(__file__).parents[1] / "presets"
    folders = (*preset_folders(), own_folder)
    return {file.stem: file for folder in folders for file in folder.glob("*.toml")}


def read_table(source: str | Path) -> TomlTable:
    """Return the table of a TOML file, or of a preset by its name.

    A table may extend a preset, with `preset = "value-residual-82m"` at its top: it is merged over
    the preset's table.

    Raises:
        WakefulError: there is no such file or preset, or it is not TOML.
    """
    path = Path(source)
    if os.path.isfile(path):  # which, unlike Path.is_file, accepts a name that is too long
        try:
            content = path.read_bytes()
        except OSError as error:
            raise WakefulError(f"{path} cannot be read: {error.strerror or error}") from None
        table = parse_toml(content, str(path))
    elif str(source) in preset_names():
        table = read_preset_table(str(source))
    else:
        hint = did_you_mean(str(source), preset_names()) or did_you_mean_path(source)
        raise WakefulError(
            f"no configuration {str(source)[:200]!r}: it is neither a file nor a preset{hint}; "
            "wakeful presets lists those"
        )
    return merge_over_preset(table, str(source))


def read_preset_table(name: str) -> TomlTable:
    """Return the table in a preset's file, without that of the preset that it extends."""
    return parse_toml(read_preset(name).encode(), f"preset {name}")


def read_preset(name: str) -> str:
    """Return the text of a preset's file.

    Raises:
        WakefulError: there is no preset of that name.
    """
    if name not in preset_names():
        raise WakefulError(f"there is no preset {name!r}{did_you_mean(name, preset_names())}")
    return _preset_files()[name].read_text("utf-8")


def merge_over_preset(table: Mapping[str, Any], name: str) -> TomlTable:
    """Return a table merged over the preset that its entry `preset` names; a table without that
    entry stays as it is. A preset may extend another preset.

    `name` is the table's name in errors.

    Raises:
        WakefulError: no preset has this name.
    """
    changes = {key: value for key, value in table.items() if key != "preset"}
    if "preset" not in table:
        return changes
    base = table["preset"]
    if base not in preset_names():
        raise WakefulError(
            f"{name}: unknown preset {base!r}{did_you_mean(str(base), preset_names())}"
        )
    # Not read_table: a file that is called like the preset must not replace it.
    return merge_tables(merge_over_preset(read_preset_table(base), base), changes)


def parse_toml(content: bytes, name: str) -> TomlTable:
    """Return the table in a TOML text, in bounded time and memory; `name` is the text's name in
    errors.

    Raises:
        WakefulError: it is not TOML, or larger than any configuration is, or a name in it has so
            many parts that the parser would take too long.
    """
    if len(content) > _MAX_BYTES:
        raise WakefulError(
            f"{name} has {len(content):,} bytes, and at most {_MAX_BYTES:,} are read"
        )
    # The dots of a name stand in one line and before its "=", or between the brackets of a table.
    if max(part.count(b".") for part in re.split(rb"[=\n]", content)) > _MAX_DOTS:
        raise WakefulError(f"{name} has a line with more than {_MAX_DOTS} dots in a row of names")
    text = decode_utf8(content, name)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a ValueError too: a number of 5,000 digits
        raise WakefulError(f"{name} is not TOML: {error}") from None


def from_table(kind: Any, table: object, *, record: str = "") -> Any:
    """Return a value of the type `kind`, usually a dataclass, from a table; nested values are
    checked too.

    `record` is the name of a file that a program wrote, "" for what a user wrote. In a record,
    unknown fields are ignored, for a later version may have written them, and numbers must be
    finite.

    Raises:
        WakefulError: a field is missing, unknown or of another type.
    """
    return _Reader(record).read(kind, table, "")


def to_table(value: object) -> TomlTable:
    """Return a dataclass as a table of all its fields, nested dataclasses included."""
    return typing.cast(TomlTable, _to_plain(value))


def flatten_table(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every entry of a table, nested tables included."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten_table(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nest_value(name: str, value: Any) -> TomlTable:
    """Return the nested table in which a dotted name has a value, such as {"a": {"b": 1}} for the
    name "a.b" and the value 1.
    """
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def merge_tables(base: Mapping[str, Any], changes: Mapping[str, Any]) -> TomlTable:
    """Return `base` updated with the entries of `changes`, nested tables recursively.

    Two sizes in `base` are dropped, since they would not fit the changes any more:
    `model.vocab_size` if `changes` set `data.vocab_size`, and the `vocab_size` of a tokenizer to
    train if `changes`, or a table in them, name a `tokenizer` without a `vocab_size`.
    """
    result = dict(base)
    data, model = changes.get("data"), base.get("model")
    # Both are mappings only in a table of a whole configuration.
    if isinstance(data, Mapping) and "vocab_size" in data and isinstance(model, Mapping):
        result["model"] = {key: value for key, value in model.items() if key != "vocab_size"}
    if changes.get("tokenizer") and "vocab_size" not in changes:
        result.pop("vocab_size", None)
    for key, value in changes.items():
        old_value = result.get(key)
        if isinstance(value, Mapping) and isinstance(old_value, Mapping):
            result[key] = merge_tables(old_value, value)
        else:
            result[key] = value
    return result


class _Reader(NamedTuple):
    """Reads values of given types from a table; `record` is the file's name (see `from_table`).

    In its methods, `path` is the dotted path of the value in the table, for errors.
    """

    record: str

    def read(self, kind: Any, value: Any, path: str) -> Any:
        """Return a value as the type `kind`.

        If this type is a tuple, a dataclass or a float, a list, a table or a whole number becomes
        one. Elements and fields are read in the same way.

        `path` is the value's dotted path in the whole table, for errors.

        Raises:
            WakefulError: the value is of another type, or a number in a record is not finite.
        """
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if kind is Any or (origin is Literal and value in arguments):
            return value
        if dataclasses.is_dataclass(kind):
            return self._read_dataclass(typing.cast(type, kind), value, path)
        if origin is tuple and isinstance(value, list | tuple):
            return tuple(  # of any length, with elements of one type
                self.read(arguments[0], item, f"{path}[{n}]") for n, item in enumerate(value)
            )
        if origin in (dict, Mapping) and isinstance(value, Mapping):
            return {
                key: self.read(arguments[1], item, _join_path(path, key))
                for key, item in value.items()
            }
        if origin in (typing.Union, types.UnionType):
            return self._read_union(kind, value, path)
        if kind in (int, float) and type(value) in (int, float):
            if kind is float and abs(value) < _NUMBER_BOUND:
                value = float(value)  # a whole number may stand for a float
            if self.record and not abs(value) < _NUMBER_BOUND:  # infinite, NaN or too large
                raise self._error(f"{path} must be finite, got {_shorten(value)}")
        if type(value) is not kind:  # not isinstance: to it True is an int
            hint = did_you_mean(str(value), map(str, arguments)) if origin is Literal else ""
            raise self._error(f"{path} must be {_describe_type(kind)}, got {_shorten(value)}{hint}")
        return value

    def _read_dataclass(self, kind: type, table: object, path: str) -> Any:
        """Return an instance of the dataclass `kind` from a table of its fields.

        In a record, a file that a program wrote, unknown fields are ignored: a later version may
        have written them.

        Raises:
            WakefulError: a field is missing, unknown or of another type, or the dataclass's own
                checks fail.
        """
        if not isinstance(table, Mapping):
            raise self._error(f"{path or 'it'} must be a table, got {_shorten(table)}")
        fields, annotations = dataclasses.fields(kind), _field_annotations(kind)
        unknown = [key for key in table if key not in annotations]
        if unknown and not self.record:
            raise WakefulError(
                f"unknown key {_join_path(path, unknown[0])!r}"
                f"{did_you_mean(str(unknown[0]), annotations)}; "
                f"{path or 'the top level'} has {', '.join(sorted(annotations))}"
            )
        values: dict[str, Any] = {}
        for entry in fields:
            if entry.name in table:
                field_path = _join_path(path, entry.name)
                kind_of_field = annotations[entry.name]
                values[entry.name] = self.read(kind_of_field, table[entry.name], field_path)
        for entry in fields:
            defaults = (entry.default, entry.default_factory)
            required = all(default is dataclasses.MISSING for default in defaults)
            if required and entry.name not in values:
                raise self._error(f"{_join_path(path, entry.name)} is missing")
        try:
            return kind(**values)
        except WakefulError as error:
            raise self._error(str(error)) from None

    def _read_union(self, union: Any, value: Any, path: str) -> Any:
        """Return a value as the first type of a union that accepts it.

        Raises:
            WakefulError: no type of the union accepts it.
        """
        kinds = typing.get_args(union)
        if value is None and types.NoneType in kinds:
            return None
        kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
        if len(kinds) == 1:  # its own error says more than that of a union
            return self.read(kinds[0], value, path)
        for kind in kinds:
            with contextlib.suppress(WakefulError):
                return self.read(kind, value, path)
        raise self._error(f"{path} must be {_describe_type(union)}, got {_shorten(value)}")

    def _error(self, problem: str) -> WakefulError:
        return WakefulError(f"{self.record}: {problem}" if self.record else problem)


@functools.cache
def _field_annotations(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, without their `Annotated` extras."""
    annotations = typing.get_type_hints(kind)
    return {entry.name: annotations[entry.name] for entry in dataclasses.fields(kind)}


def _join_path(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _describe_type(kind: Any) -> str:
    """Return a type in words for errors: "a whole number" for int, or "one of a, b" for a `Literal`
    of these.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_describe_type, arguments))
    return {
        int: "a whole number", float: "a number", str: "a string", bool: "true or false",
        tuple: "a list", dict: "a table", Mapping: "a table", types.NoneType: "null",
    }[origin or kind]  # fmt: skip


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _to_plain(value: Any) -> Any:
    """Return a value with dataclasses as tables and tuples as lists, at any depth."""
    kind = type(value)
    if kind in _PLAIN_TYPES:  # the most common case, first: large files have 500,000 values
        return value
    if dataclasses.is_dataclass(kind):
        return {name: _to_plain(getattr(value, name)) for name in _field_annotations(kind)}
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return value
