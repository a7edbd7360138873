"""A verb's options from keyword arguments."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from wakeful.config.tables import from_table, merged, to_table
from wakeful.config.verbs.inherit import SHORT, InheritOptions, inherit_table
from wakeful.errors import WakefulError, nearest

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Nothing: a verb that takes arguments alone."""


def options_from(kind: type[T], given: Mapping[str, Any], base: T | None = None) -> T:
    """Return a verb's options: `base`, or the usual ones, changed by keyword arguments.

    A list serves for a tuple, and a single value for a tuple of one.

    Raises:
        WakefulError: there is no such option, or its value is of another type.
    """
    if base is not None and not given:
        return base
    names = {entry.name for entry in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    names |= set(SHORT) if kind is InheritOptions else set()
    for name in given:
        if name not in names:
            raise WakefulError(
                f"there is no option {name!r}{nearest(name, names)}; there are "
                f"{', '.join(sorted(names))}"
            )
    return filled(kind, {name: _plain(kind, name, value) for name, value in given.items()}, base)


def filled(kind: type[T], table: Mapping[str, Any], base: T | None = None) -> T:
    """Return a verb's options: `base`, or the usual ones, changed by a table's entries."""
    if kind is InheritOptions:
        base, table = base or kind(), inherit_table(table)
    return from_table(kind, table if base is None else merged(to_table(base), table))


def _plain(kind: type, name: str, value: Any) -> Any:
    default = getattr(kind, name, None)
    if isinstance(default, tuple) and not isinstance(value, list | tuple | range):
        return [value]
    if hasattr(value, "__fspath__"):
        return str(value)
    return list(value) if isinstance(value, range) else value
