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
    """Return the flag of an option: "--train.steps" for "train.steps".

    With `negative` it is the flag that turns a switch off: "--train.no_compile". The underscore at
    the end of a name such as `for_`, which would be a Python keyword without it, is left out.
    """
    section, dot, last = name.rstrip("_").rpartition(".")
    prefix = "no_" if negative else ""
    return f"--{section}{dot}{prefix}{last}"


def iterate_options(options_class: type, default: Any = None, prefix: str = "") -> Iterator[Option]:
    """Yield the options of a dataclass and of its nested dataclasses, inherited fields last.

    The two other arguments are for a nested dataclass: `default` is the instance that has the
    options' defaults, and `prefix` the dotted path to it, such as "train.".
    """
    hints = typing.get_type_hints(options_class, include_extras=True)
    plain_types = typing.get_type_hints(options_class)
    texts = field_descriptions(options_class)
    for entry in _sort_fields(options_class):
        name, kind = prefix + entry.name, plain_types[entry.name]
        value = field_default(entry) if default is None else getattr(default, entry.name)
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            yield from iterate_options(kind, value, f"{name}.")
            continue
        extras = getattr(hints[entry.name], "__metadata__", ())
        group = next((extra for extra in extras if isinstance(extra, Heading)), None)
        yield Option(name, kind, texts[entry.name], value, group)


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
    """Return {class name: {field name: string below the field}} for the classes of a module.

    The strings are read from the source: Python drops a string that stands by itself.
    """
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    strings: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        strings[node.name] = {
            field.target.id: " ".join(str(below.value.value).split())  # in one line
            for field, below in itertools.pairwise(node.body)
            # `field: type = value`, and below it a constant that stands by itself
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        }
    return strings


def _sort_fields(options_class: Any) -> list[dataclasses.Field[Any]]:
    """Return a dataclass's fields: its own first, then those of its base classes in their order."""

    classes = options_class.__mro__

    def index_of_class(entry: dataclasses.Field[Any]) -> int:
        """Return the index in `classes` of the first class that declares a field."""
        declares = [entry.name in vars(base).get("__annotations__", {}) for base in classes]
        return declares.index(True)

    return sorted(dataclasses.fields(options_class), key=index_of_class)


def field_default(entry: dataclasses.Field[Any]) -> Any:
    """Return a dataclass field's default value; `dataclasses.MISSING` where a value is required."""
    factory = entry.default_factory
    return entry.default if factory is dataclasses.MISSING else factory()
