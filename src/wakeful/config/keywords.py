"""A verb's options from keyword arguments."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from wakeful.config.options import default_of, options_of
from wakeful.config.tables import from_table, merged, to_table
from wakeful.errors import WakefulError, nearest

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


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
    names |= set(short_names(kind))
    for name in given:
        if name not in names:
            raise WakefulError(
                f"there is no option {name!r}{nearest(name, names)}; there are "
                f"{', '.join(sorted(names))}"
            )
    return filled(kind, {name: _plain(kind, name, value) for name, value in given.items()}, base)


def filled(kind: type[T], table: Mapping[str, Any], base: T | None = None) -> T:
    """Return a verb's options: `base`, or the usual ones, changed by a table's entries."""
    if expand := getattr(kind, "expand", None):
        base, table = base or kind(), expand(table)
    return from_table(kind, table if base is None else merged(to_table(base), table))


def short_names(kind: type) -> Mapping[str, str]:
    """Return the short names of options, and the fields that they stand for."""
    return getattr(kind, "short_names", {})


def _plain(kind: type, name: str, value: Any) -> Any:
    default = getattr(kind, name, None)
    if isinstance(default, tuple) and not isinstance(value, list | tuple | range):
        return [value]
    if hasattr(value, "__fspath__"):
        return str(value)
    return list(value) if isinstance(value, range) else value


def takes(kind: type) -> Callable[[F], F]:
    """Return a decorator: the fields of these options are keyword arguments of a function too.

    It changes the function's signature alone, which notebooks complete from. What an editor and a
    type checker read is `__init__.pyi`, written from the same fields.
    """
    hints = get_type_hints(kind)
    names = [entry.name for entry in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    fields = [(name, default_of(kind.__dataclass_fields__[name]), hints[name]) for name in names]  # pyright: ignore[reportAttributeAccessIssue]
    if short := short_names(kind):
        kinds = {option.name: option.kind for option in options_of(kind)}
        fields += [(name, None, kinds[target] | None) for name, target in short.items()]

    def signed(function: F) -> F:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        known = {each.name for each in own}
        function.__signature__ = signature.replace(parameters=[*own, *(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=hint,
                default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
            )
            for name, default, hint in fields if name not in known
        )])  # fmt: skip
        return function

    return signed
