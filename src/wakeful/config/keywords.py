"""A verb's options from keyword arguments."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from wakeful.config.options import default_of, options_of
from wakeful.config.tables import from_table, merged, to_table
from wakeful.errors import WakefulError, did_you_mean

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Options of a verb that has none."""


def options_from(kind: type[T], kwargs: Mapping[str, Any], base: T | None = None) -> T:
    """Return a verb's options: `base`, or the defaults, changed by keyword arguments.

    A list serves for a tuple, and a single value for a tuple of one.

    Raises:
        WakefulError: there is no such option, or its value is of another type.
    """
    if base is not None and not kwargs:
        return base
    names = {entry.name for entry in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    names |= set(short_names(kind))
    for name in kwargs:
        if name not in names:
            raise WakefulError(
                f"there is no option {name!r}{did_you_mean(name, names)}; there are "
                f"{', '.join(sorted(names))}"
            )
    return fill_options(
        kind, {name: _plain(kind, name, value) for name, value in kwargs.items()}, base
    )


def fill_options(kind: type[T], table: Mapping[str, Any], base: T | None = None) -> T:
    """Return a verb's options: `base`, or the defaults, changed by a table's entries."""
    if expand := getattr(kind, "expand", None):
        base, table = base or kind(), expand(table)
    return from_table(kind, table if base is None else merged(to_table(base), table))


def short_names(kind: type) -> Mapping[str, str]:
    """Return the fields that the short names of options mean, by short name."""
    return getattr(kind, "short_names", {})


def _plain(kind: type, name: str, value: Any) -> Any:
    default = getattr(kind, name, None)
    if isinstance(default, tuple) and not isinstance(value, list | tuple | range):
        return [value]
    if hasattr(value, "__fspath__"):
        return str(value)
    return list(value) if isinstance(value, range) else value


def accept_options(kind: type) -> Callable[[F], F]:
    """Return a decorator that adds the fields of these options to a function's signature.

    Notebooks complete keyword arguments from that signature. Editors and type checkers read
    `__init__.pyi`, which `tools/signatures.py` writes from the same fields.
    """
    hints = get_type_hints(kind)
    names = [entry.name for entry in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    fields = [(name, default_of(kind.__dataclass_fields__[name]), hints[name]) for name in names]  # pyright: ignore[reportAttributeAccessIssue]
    if short := short_names(kind):
        kinds = {option.name: option.kind for option in options_of(kind)}
        fields += [(name, None, kinds[target] | None) for name, target in short.items()]

    def signed(function: F) -> F:
        signature = inspect.signature(function)
        parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        names = {parameter.name for parameter in parameters}
        function.__signature__ = signature.replace(parameters=[*parameters, *(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=hint,
                default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
            )
            for name, default, hint in fields if name not in names
        )])  # fmt: skip
        return function

    return signed
