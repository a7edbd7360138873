"""Dataclasses as tables: what TOML holds, field by field, each value of its declared type."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from wakeful.config.toml_text import parse_toml
from wakeful.errors import WakefulError, nearest

Table = dict[str, Any]


def presets() -> list[str]:
    """Return the names of the configurations that come with wakeful."""
    folder = resources.files("wakeful") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())


def read_table(source: str | Path) -> Table:
    """Return the table of a TOML file, or of a preset by its name.

    A table may start from a preset: `preset = "value-residual-82m"` at its top.

    Raises:
        WakefulError: there is no such file or preset, or it is not TOML.
    """
    path = Path(source)
    if _is_file(path):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise WakefulError(f"{path} cannot be read: {error.strerror or error}") from None
        table = parse_toml(content, str(path))
    elif str(source) in presets():
        text = (resources.files("wakeful") / "presets" / f"{source}.toml").read_bytes()
        table = parse_toml(text, f"preset {source}")
    else:
        raise WakefulError(
            f"no configuration {str(source)[:200]!r}: it is neither a file nor a preset"
            f"{nearest(str(source), presets())}; presets are {', '.join(presets())}"
        )
    return on_preset(table, str(source))


def on_preset(table: Mapping[str, Any], name: str) -> Table:
    """Return a table on top of the preset that it names at its top, if it names one."""
    rest = {key: value for key, value in table.items() if key != "preset"}
    if "preset" not in table:
        return rest
    base = table["preset"]
    if base not in presets():
        raise WakefulError(f"{name}: unknown preset {base!r}{nearest(str(base), presets())}")
    return merged(read_table(base), rest)


def from_table(kind: type, table: Mapping[str, Any]) -> Any:
    """Return the dataclass of this kind that a table describes; see `config_from_table`."""
    return _read(kind, table, "")


def to_table(value: object) -> Table:
    """Return every field of a dataclass, and of those in it, as a table."""
    return typing.cast(Table, _plain(value))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """Return `base` with the entries of `over` in place of its own, tables merged in turn."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long for a name
        return False


def _read(kind: type, table: object, place: str) -> Any:
    if not isinstance(table, Mapping):
        raise WakefulError(f"{place} must be a table, got {table!r}")
    hints = typing.get_type_hints(kind)
    fields = {entry.name for entry in dataclasses.fields(kind)}
    values: Table = {}
    for key, value in table.items():
        where = f"{place}.{key}" if place else str(key)
        if key not in fields:
            raise WakefulError(
                f"unknown key {where!r}{nearest(str(key), fields)}; "
                f"{place or 'the top level'} has {', '.join(sorted(fields))}"
            )
        expected = hints[key]
        if dataclasses.is_dataclass(expected) and isinstance(expected, type):
            values[key] = _read(expected, value, where)
        else:
            values[key] = _typed(expected, value, where)
    for entry in dataclasses.fields(kind):
        required = entry.default is dataclasses.MISSING is entry.default_factory
        if required and entry.name not in values:
            raise WakefulError(f"{place or 'the top level'} has no {entry.name}")
    return kind(**values)


def _typed(expected: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is Literal:
        if value not in arguments:
            allowed = ", ".join(map(str, arguments))
            raise WakefulError(f"{where} must be one of {allowed}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise WakefulError(f"{where} must be a list, got {value!r}")
        return tuple(_typed(arguments[0], item, f"{where}[{n}]") for n, item in enumerate(value))
    if origin in (typing.Union, types.UnionType):
        raise TypeError(f"{where}: the schema uses no unions")
    if expected is float and type(value) is int and abs(value) < 2**1000:  # as floats are
        return float(value)
    if type(value) is not expected:
        raise WakefulError(f"{where} must be {_words(expected)}, got {value!r}")
    return value


def _words(kind: type) -> str:
    return {
        int: "a whole number", float: "a number", str: "a string", bool: "true or false"
    }[kind]  # fmt: skip


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)
        }
    return list(value) if isinstance(value, tuple) else value
