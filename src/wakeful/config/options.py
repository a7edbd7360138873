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
from collections.abc import Iterable, Iterator
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
        """The flag that sets the option."""
        return flag_name(self.name)

    @property
    def negative(self) -> str:
        """The flag that turns a switch off."""
        return flag_name(self.name, negative=True)

    @property
    def section(self) -> str:
        """Dotted name of the part that the option belongs to; "" at the top."""
        return self.name.rpartition(".")[0]

    @property
    def value_type(self) -> Any:
        """The type of one value: the option's type, or that of the elements of its tuple."""
        return typing.get_args(self.kind)[0] if self.takes_several else self.kind

    @property
    def choices(self) -> tuple[Any, ...]:
        """The allowed values of a `Literal` option; empty for other types."""
        kind = self.value_type
        return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()

    @property
    def takes_several(self) -> bool:
        """True where the option takes several values."""
        return typing.get_origin(self.kind) is tuple


def flag_name(name: str, *, negative: bool = False) -> str:
    """Return the flag that sets an option, or with `negative` turns it off: "--train.steps",
    "--no_bos".

    The _ of a name such as `for_`, a Python keyword without it, is left out.
    """
    section, dot, last = name.rstrip("_").rpartition(".")
    return f"--{section}{dot}{'no_' * negative}{last}"


def iterate_options(
    options_class: type, default: Any = None, prefix: str = "", overrides: Overrides | None = None
) -> Iterator[Option]:
    """Yield the options of a dataclass and of its nested dataclasses, inherited fields last.

    Defaults are those of `default`, an instance of the class, if given. `prefix` is the dotted path
    of a nested dataclass, "" for an outer one; `overrides` replaces descriptions of options and
    removes the headings of those that it calls rare.
    """
    hints = typing.get_type_hints(options_class, include_extras=True)
    plain_types = typing.get_type_hints(options_class)
    overrides = overrides or Overrides()
    texts = field_descriptions(options_class) | dict(overrides.descriptions)
    for entry in _sort_fields(options_class):
        name, kind = prefix + entry.name, plain_types[entry.name]
        extras = getattr(hints[entry.name], "__metadata__", ())
        value = field_default(entry) if default is None else getattr(default, entry.name)
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            nested = _nested_overrides(entry.name, extras, overrides)
            yield from iterate_options(kind, value, f"{name}.", nested)
            continue
        group = next((extra for extra in extras if isinstance(extra, Heading)), None)
        group = None if entry.name in overrides.rare else group
        yield Option(name, kind, texts[entry.name], value, group)


def _nested_overrides(part: str, extras: Iterable[Any], outer: Overrides) -> Overrides:
    """Return the overrides of a nested dataclass in the field `part`.

    They are those annotated on the field's type (`extras`), and the outer dataclass's descriptions
    whose dotted names begin with the field's.
    """
    annotated = next((extra for extra in extras if isinstance(extra, Overrides)), Overrides())
    inherited = [
        (name.removeprefix(f"{part}."), text)
        for name, text in outer.descriptions
        if name.startswith(f"{part}.")
    ]
    return Overrides(annotated.rare, (*annotated.descriptions, *inherited))


def field_descriptions(kind: type) -> dict[str, str]:
    """Return the description of every field of a dataclass, inherited ones included: the string
    below the field in the source.
    """
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):  # all bases but `object`
        texts |= _field_strings(base.__module__).get(base.__name__, {})
    return texts


@functools.cache
def _field_strings(module: str) -> dict[str, dict[str, str]]:
    """Return the strings below the fields of each class of a module, by class and field name.

    They are in the source alone: Python drops a string that stands by itself.
    """
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    strings: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        strings[node.name] = {
            field.target.id: " ".join(str(below.value.value).split())
            for field, below in itertools.pairwise(node.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        }
    return strings


def _sort_fields(options_class: Any) -> list[dataclasses.Field[Any]]:
    """Return a dataclass's fields: its own first, then those of its base classes in their order."""

    def distance(entry: dataclasses.Field[Any]) -> int:
        """Return the place, among the class and its bases, of the first that declares a field."""
        bases = options_class.__mro__
        declares = [entry.name in vars(base).get("__annotations__", {}) for base in bases]
        return declares.index(True)

    return sorted(dataclasses.fields(options_class), key=distance)


def field_default(entry: dataclasses.Field[Any]) -> Any:
    """Return a dataclass field's default value; `dataclasses.MISSING` where a value is required."""
    factory = entry.default_factory
    return entry.default if factory is dataclasses.MISSING else factory()
