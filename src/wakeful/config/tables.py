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
from typing import Annotated, Any, Literal, NamedTuple

from wakeful.config.options import Hint
from wakeful.errors import WakefulError, did_you_mean, did_you_mean_path
from wakeful.terminal.plain_text import decode_utf8
from wakeful.variants.plugins import preset_folders

TomlTable = dict[str, Any]
_LARGEST = 2**18
"""Largest TOML file, in bytes; a configuration has a few thousand."""
_MOST_DOTS = 200
"""Most dots in a name: the parser takes time and memory quadratic in its parts."""
_LEAVES = frozenset({str, int, float, bool, types.NoneType})
_LARGEST_NUMBER = 2**1000
"""Bound of numbers: a larger whole number has no float."""


def preset_names() -> list[str]:
    """Return the names of the presets of wakeful and of installed packages."""
    return sorted(_preset_files())


@functools.cache
def _preset_files() -> dict[str, Path]:
    own = Path(__file__).parents[1] / "presets"
    folders = (*preset_folders(), own)
    return {file.stem: file for folder in folders for file in folder.glob("*.toml")}


def read_table(source: str | Path) -> TomlTable:
    """Return the table of a TOML file, or of a preset by its name.

    A table may start from a preset: `preset = "value-residual-82m"` at its top.

    Raises:
        WakefulError: there is no such file or preset, or it is not TOML.
    """
    path = Path(source)
    if os.path.isfile(path):  # which a name too long is not
        try:
            content = path.read_bytes()
        except OSError as error:
            raise WakefulError(f"{path} cannot be read: {error.strerror or error}") from None
        table = parse_toml(content, str(path))
    elif str(source) in preset_names():
        table = own_table(str(source))
    else:
        hint = did_you_mean(str(source), preset_names()) or did_you_mean_path(source)
        raise WakefulError(
            f"no configuration {str(source)[:200]!r}: it is neither a file nor a preset{hint}; "
            "wakeful presets lists those"
        )
    return on_preset(table, str(source))


def own_table(name: str) -> TomlTable:
    """Return a preset's own table, without that of the preset it extends."""
    return parse_toml(preset_text(name).encode(), f"preset {name}")


def preset_text(name: str) -> str:
    """Return the file of a preset.

    Raises:
        WakefulError: there is none of that name.
    """
    if name not in preset_names():
        raise WakefulError(f"there is no preset {name!r}{did_you_mean(name, preset_names())}")
    return _preset_files()[name].read_text("utf-8")


def on_preset(table: Mapping[str, Any], name: str) -> TomlTable:
    """Return a table merged over the preset that it names, if it names one."""
    rest = {key: value for key, value in table.items() if key != "preset"}
    if "preset" not in table:
        return rest
    base = table["preset"]
    if base not in preset_names():
        raise WakefulError(
            f"{name}: unknown preset {base!r}{did_you_mean(str(base), preset_names())}"
        )
    return merged(on_preset(own_table(base), base), rest)  # a file of that name is no preset


def parse_toml(content: bytes, name: str) -> TomlTable:
    """Return the table of a TOML text, in bounded time and memory; errors call it `name`.

    Raises:
        WakefulError: it is not TOML, or larger than any configuration is.
    """
    if len(content) > _LARGEST:
        raise WakefulError(f"{name} has {len(content):,} bytes, and at most {_LARGEST:,} are read")
    if max(part.count(b".") for part in re.split(rb"[=\n]", content)) > _MOST_DOTS:
        raise WakefulError(f"{name} has a line with more than {_MOST_DOTS} dots in a row of names")
    text = decode_utf8(content, name)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a ValueError too: a number of 5,000 digits
        raise WakefulError(f"{name} is not TOML: {error}") from None


def from_table(kind: Any, table: object, *, record: str = "") -> Any:
    """Return the value of this type, usually a dataclass, that a table describes.

    `record` is the name of the file where a program wrote the table: unknown fields, which a later
    version may have written, are then ignored, and numbers must be finite.

    Raises:
        WakefulError: a field is missing, unknown or of another type.
    """
    return _Reader(record).value(kind, table, "")


def to_table(value: object) -> TomlTable:
    """Return a dataclass as a table of all its fields, nested dataclasses included."""
    return typing.cast(TomlTable, _plain(value))


def flatten_table(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every entry of a table, nested tables included."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten_table(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nest_value(name: str, value: Any) -> TomlTable:
    """Return the nested table in which a dotted name has this value."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> TomlTable:
    """Return `base` updated with the entries of `over`, nested tables recursively.

    A `tokenizer` in `over` removes the `vocab_size` of a tokenizer to train from `base`, and a
    `data.vocab_size` in `over` removes `model.vocab_size`.
    """
    result = dict(base)
    data, model = over.get("data"), base.get("model")
    if isinstance(data, Mapping) and "vocab_size" in data and isinstance(model, Mapping):
        result["model"] = {key: value for key, value in model.items() if key != "vocab_size"}
    if over.get("tokenizer") and "vocab_size" not in over:
        result.pop("vocab_size", None)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result


class _Reader(NamedTuple):
    record: str

    def value(self, expected: Any, value: Any, path: str) -> Any:
        origin, arguments = typing.get_origin(expected), typing.get_args(expected)
        if expected is Any or (origin is Literal and value in arguments):
            return value
        if dataclasses.is_dataclass(expected):
            return self._dataclass(typing.cast(type, expected), value, path)
        if origin is tuple and isinstance(value, list | tuple):
            return tuple(
                self.value(arguments[0], item, f"{path}[{n}]") for n, item in enumerate(value)
            )
        if origin in (dict, Mapping) and isinstance(value, Mapping):
            return {
                key: self.value(arguments[1], item, _join(path, key)) for key, item in value.items()
            }
        if origin in (typing.Union, types.UnionType):
            return self._one_of(arguments, expected, value, path)
        if expected in (int, float) and type(value) in (int, float):
            value = float(value) if expected is float and abs(value) < _LARGEST_NUMBER else value
            if self.record and not abs(value) < _LARGEST_NUMBER:
                raise self._refused(f"{path} must be finite, got {_shorten(value)}")
        if expected is types.NoneType or type(value) is not expected:
            hint = did_you_mean(str(value), map(str, arguments)) if origin is Literal else ""
            raise self._refused(
                f"{path} must be {_name_type(expected)}, got {_shorten(value)}{hint}"
            )
        return value

    def _field(self, hint: Any, value: Any, path: str) -> Any:
        """Return the value of a field; a `Hint` on its type is appended to the error."""
        kind, *extras = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        try:
            return self.value(kind, value, path)
        except WakefulError as error:
            hints = "".join(f"; {extra.description}" for extra in extras if isinstance(extra, Hint))
            raise WakefulError(f"{error}{hints}") from None

    def _dataclass(self, kind: type, table: object, path: str) -> Any:
        if not isinstance(table, Mapping):
            raise self._refused(f"{path or 'it'} must be a table, got {_shorten(table)}")
        fields, hints = dataclasses.fields(kind), _hints(kind)
        unknown = [key for key in table if key not in hints]
        if unknown and not self.record:
            raise WakefulError(
                f"unknown key {_join(path, unknown[0])!r}{did_you_mean(str(unknown[0]), hints)}; "
                f"{path or 'the top level'} has {', '.join(sorted(hints))}"
            )
        values = {
            entry.name: self._field(hints[entry.name], table[entry.name], _join(path, entry.name))
            for entry in fields
            if entry.name in table
        }
        for entry in fields:
            required = entry.default is dataclasses.MISSING is entry.default_factory
            if required and entry.name not in values:
                raise self._refused(f"{_join(path, entry.name)} is missing")
        try:
            return kind(**values)
        except WakefulError as error:
            raise self._refused(str(error)) from None

    def _one_of(self, arms: tuple[Any, ...], expected: Any, value: Any, path: str) -> Any:
        if value is None and types.NoneType in arms:
            return None
        arms = tuple(arm for arm in arms if arm is not types.NoneType)
        if len(arms) == 1:
            return self.value(arms[0], value, path)
        for arm in arms:
            with contextlib.suppress(WakefulError):
                return self.value(arm, value, path)
        raise self._refused(f"{path} must be {_name_type(expected)}, got {_shorten(value)}")

    def _refused(self, problem: str) -> WakefulError:
        return WakefulError(f"{self.record}: {problem}" if self.record else problem)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(kind)}


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _name_type(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_name_type, arguments))
    return {
        int: "a whole number", float: "a number", str: "a string", bool: "true or false",
        tuple: "a list", dict: "a table", Mapping: "a table", types.NoneType: "null",
    }[origin or kind]  # fmt: skip


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _LEAVES:  # the most common case, tested first: large files have 500,000 values
        return value
    if dataclasses.is_dataclass(kind):
        return {name: _plain(getattr(value, name)) for name in _hints(kind)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
