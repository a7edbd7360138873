"""Options declared by dataclasses: names, descriptions and headings in help.

A field's heading is part of its type, `text: What[str] = ""`. An option without a heading is rarely
needed: only `--help-all` lists it. Nothing here imports torch or the parser.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")


class Heading(Enum):
    """Headings of help, in order."""

    WHAT = "What"
    HOW = "How"
    MUCH = "How much, how long"
    WHERE = "Where"


What = Annotated[T, Heading.WHAT]
"""Models, texts and their parts."""
How = Annotated[T, Heading.HOW]
"""Ways to measure, train or write."""
HowMuch = Annotated[T, Heading.MUCH]
"""Sizes, numbers of steps, time."""
Where = Annotated[T, Heading.WHERE]
"""Folders, files and devices."""


@dataclass(frozen=True)
class Overrides:
    """Changes to the options of a part where it is used, annotated on the part's type."""

    rare: tuple[str, ...] = ()
    """Names of options that are rarely needed there."""
    descriptions: tuple[tuple[str, str], ...] = ()
    """Names of options, and descriptions that replace those in the source."""


@dataclass(frozen=True)
class Hint:
    """Advice appended to the error about a value that the option does not take, annotated on the
    option's type."""

    description: str


@dataclass(frozen=True)
class Option:
    """An option: a field of a verb's options or of one of their parts."""

    name: str
    """Dotted name, as in flags and TOML files."""
    kind: Any
    """Its type."""
    description: str
    """Its description in the source."""
    default: Any
    """Default value; `dataclasses.MISSING` where a value is required."""
    group: Heading | None
    """Heading in `--help`; None where only `--help-all` lists it."""

    @property
    def flag(self) -> str:
        """Flag that sets it."""
        return flag_of(self.name)

    @property
    def negative(self) -> str:
        """Flag that turns it off, of a switch."""
        return flag_of(self.name, negative=True)

    @property
    def section(self) -> str:
        """Dotted name of the part that it belongs to; "" at the top."""
        return self.name.rpartition(".")[0]

    @property
    def value_type(self) -> Any:
        """Type of one value: the option's type, or that of the elements of its tuple."""
        return typing.get_args(self.kind)[0] if self.takes_several else self.kind

    @property
    def choices(self) -> tuple[Any, ...]:
        """Allowed values, of a `Literal`."""
        kind = self.value_type
        return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()

    @property
    def takes_several(self) -> bool:
        """True where it takes several values."""
        return typing.get_origin(self.kind) is tuple


def flag_of(name: str, *, negative: bool = False) -> str:
    """Return the flag that sets an option or turns it off, without the _ after a Python keyword."""
    section, dot, last = name.rstrip("_").rpartition(".")
    return f"--{section}{dot}{'no_' * negative}{last}"


def options_of(
    kind: type, default: Any = None, prefix: str = "", overrides: Overrides | None = None
) -> Iterator[Option]:
    """Yield the options of a dataclass and of its parts, its own fields before inherited ones.

    Where `default` is given, an instance of the dataclass, its values are the defaults.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    plain = typing.get_type_hints(kind)
    overrides = overrides or Overrides()
    texts = descriptions(kind) | dict(overrides.descriptions)
    for entry in _sorted_fields(kind):
        name, inner = prefix + entry.name, plain[entry.name]
        extras = getattr(hints[entry.name], "__metadata__", ())
        value = default_of(entry) if default is None else getattr(default, entry.name)
        if dataclasses.is_dataclass(inner):
            assert isinstance(inner, type)
            own = next((extra for extra in extras if isinstance(extra, Overrides)), Overrides())
            parts = ((dotted.partition("."), text) for dotted, text in overrides.descriptions)
            inherited = tuple((rest, text) for (part, _, rest), text in parts if part == entry.name)
            own = Overrides(own.rare, own.descriptions + inherited)
            yield from options_of(inner, value, f"{name}.", own)
            continue
        group = next((extra for extra in extras if isinstance(extra, Heading)), None)
        group = None if entry.name in overrides.rare else group
        yield Option(name, inner, texts[entry.name], value, group)


def descriptions(kind: type) -> dict[str, str]:
    """Return the description of every field: the string below it in the source."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        texts |= _field_strings(base.__module__).get(base.__name__, {})
    return texts


@functools.cache
def _field_strings(module: str) -> dict[str, dict[str, str]]:
    """Return the strings below the fields of each class of a module."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        node.name: {
            field.target.id: " ".join(str(below.value.value).split())
            for field, below in itertools.pairwise(node.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _sorted_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    def depth(entry: dataclasses.Field[Any]) -> int:
        owners = (entry.name in vars(base).get("__annotations__", {}) for base in kind.__mro__)
        return list(owners).index(True)

    return sorted(dataclasses.fields(kind), key=depth)


def default_of(entry: dataclasses.Field[Any]) -> Any:
    """Return a field's default; `dataclasses.MISSING` where a value is required."""
    factory = entry.default_factory
    return entry.default if factory is dataclasses.MISSING else factory()
