"""The options that dataclasses declare: their names, what is said of them, and where help has them.

A field's group is part of its type, `text: What[str] = ""`. One without a group is seldom needed:
`--help` leaves it to `--help-all`. Nothing here imports torch or the parser.
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
    """The headings of help, in its order."""

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
class Beside:
    """Beside the type of a part: what is special about its options there."""

    seldom: tuple[str, ...] = ()
    """Those that are seldom needed."""
    instead: tuple[tuple[str, str], ...] = ()
    """Names, and descriptions in place of those in the source."""


@dataclass(frozen=True)
class Elsewhere:
    """Beside the type of an option: how to come by values that it does not take."""

    words: str


@dataclass(frozen=True)
class Option:
    """One field, of a verb's options or of a part of them."""

    name: str
    """Dotted, as flags and TOML files have it."""
    kind: Any
    """Its type."""
    words: str
    """Its description in the source."""
    default: Any
    """Its value where none is given; `dataclasses.MISSING` where one must be."""
    group: Heading | None
    """Where `--help` has it; None where only `--help-all` does."""

    @property
    def flag(self) -> str:
        """The flag that sets it."""
        return flag_of(self.name)

    @property
    def negative(self) -> str:
        """The flag that turns it off there, if it is a switch."""
        return flag_of(self.name, negative=True)

    @property
    def section(self) -> str:
        """The part of the options that it is in; empty at the top."""
        return self.name.rpartition(".")[0]

    @property
    def each(self) -> Any:
        """The type of a value: its own, or that of each of several."""
        return typing.get_args(self.kind)[0] if self.many else self.kind

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that its type lists."""
        return typing.get_args(self.each) if typing.get_origin(self.each) is Literal else ()

    @property
    def many(self) -> bool:
        """Whether it takes several values."""
        return typing.get_origin(self.kind) is tuple


def flag_of(name: str, *, negative: bool = False) -> str:
    """Return the flag that sets an option or turns it off, less the _ after a Python word."""
    place, dot, last = name.rstrip("_").rpartition(".")
    return f"--{place}{dot}{'no_' * negative}{last}"


def options_of(
    kind: type, default: Any = None, prefix: str = "", beside: Beside | None = None
) -> Iterator[Option]:
    """Yield the options of a dataclass and of those in it, its own before those of its bases.

    Defaults are the values of an instance where one is given.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    plain = typing.get_type_hints(kind)
    beside = beside or Beside()
    words = descriptions(kind) | dict(beside.instead)
    for entry in _fields(kind):
        name, inner = prefix + entry.name, plain[entry.name]
        extras = getattr(hints[entry.name], "__metadata__", ())
        value = default_of(entry) if default is None else getattr(default, entry.name)
        if dataclasses.is_dataclass(inner):
            assert isinstance(inner, type)
            own = next((each for each in extras if isinstance(each, Beside)), Beside())
            parts = ((said.partition("."), text) for said, text in beside.instead)
            told = tuple((rest, text) for (part, _, rest), text in parts if part == entry.name)
            own = Beside(own.seldom, own.instead + told)
            yield from options_of(inner, value, f"{name}.", own)
            continue
        group = next((each for each in extras if isinstance(each, Heading)), None)
        group = None if entry.name in beside.seldom else group
        yield Option(name, inner, words[entry.name], value, group)


def sections_of(kind: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name of every part of a dataclass, and the first line said of it."""
    for name, inner in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            assert isinstance(inner, type)
            yield prefix + name, inspect.cleandoc(inner.__doc__ or "").split("\n\n", 1)[0]
            yield from sections_of(inner, f"{prefix}{name}.")


def descriptions(kind: type) -> dict[str, str]:
    """Return each field's description, the string below it in the source."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        found |= _strings(each.__module__).get(each.__name__, {})
    return found


@functools.cache
def _strings(module: str) -> dict[str, dict[str, str]]:
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


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    def depth(entry: dataclasses.Field[Any]) -> int:
        owners = (entry.name in vars(each).get("__annotations__", {}) for each in kind.__mro__)
        return list(owners).index(True)

    return sorted(dataclasses.fields(kind), key=depth)


def default_of(entry: dataclasses.Field[Any]) -> Any:
    """Return the value of a field where none is given; `dataclasses.MISSING` where one must be."""
    made = entry.default_factory
    return entry.default if made is dataclasses.MISSING else made()
