"""A verb's options from keyword arguments."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from wakeful.config.options import field_default, iterate_options
from wakeful.config.tables import from_table, merge_tables, to_table
from wakeful.errors import WakefulError, did_you_mean

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Options of a verb that has none."""


def options_from(options_class: type[T], kwargs: Mapping[str, Any], base: T | None = None) -> T:
    """Return a command's options: `base`, or the defaults if it is None, changed by keyword
    arguments.

    A list is accepted for a tuple, and a single value for a tuple of one. Short names of options
    are accepted too.

    Raises:
        WakefulError: an option does not exist, or its value is of another type or out of range.
    """
    if base is not None and not kwargs:
        return base
    names = {entry.name for entry in dataclasses.fields(options_class)}  # pyright: ignore[reportArgumentType]
    names |= set(short_names(options_class))
    for name in kwargs:
        if name not in names:
            raise WakefulError(
                f"there is no option {name!r}{did_you_mean(name, names)}; there are "
                f"{', '.join(sorted(names))}"
            )
    return fill_options(
        options_class,
        {name: _to_plain_value(options_class, name, value) for name, value in kwargs.items()},
        base,
    )


def fill_options(options_class: type[T], table: Mapping[str, Any], base: T | None = None) -> T:
    """Return a command's options: `base`, or the defaults if it is None, changed by the entries of
    a table.

    A class of options with short names has a function `expand`, which replaces these in the table
    by the options' own names.
    """
    if expand := getattr(options_class, "expand", None):
        table = expand(table)
        # Such a class gives its parts, nested dataclasses, other defaults than the parts' own.
        base = base or options_class()
    if base is not None:
        table = merge_tables(to_table(base), table)
    return from_table(options_class, table)


def short_names(options_class: type) -> Mapping[str, str]:
    """Return the dotted names of options that have short names, by short name."""
    return getattr(options_class, "short_names", {})


def _to_plain_value(options_class: type, name: str, value: Any) -> Any:
    """Return the value of the keyword argument `name` as a TOML table would have it.

    A path becomes a string, a range a list, and a single value a list if the option is a tuple.
    """
    default = getattr(options_class, name, None)
    if isinstance(default, tuple) and not isinstance(value, list | tuple | range):
        value = [value]
    if isinstance(value, list | tuple):
        return [str(each) if hasattr(each, "__fspath__") else each for each in value]
    if hasattr(value, "__fspath__"):
        return str(value)
    return list(value) if isinstance(value, range) else value


def accept_options(options_class: type) -> Callable[[F], F]:
    """Return a decorator that adds the fields of an options dataclass to a function's signature, as
    keyword arguments in place of its `**kwargs`.

    Only the signature changes, from which notebooks complete keyword arguments. Editors and type
    checkers read `__init__.pyi`, which `tools/signatures.py` writes from the same fields.
    """
    hints = get_type_hints(options_class)
    fields = [
        (entry.name, field_default(entry), hints[entry.name])
        for entry in dataclasses.fields(options_class)  # pyright: ignore[reportArgumentType]
    ]
    if short := short_names(options_class):
        types = {option.name: option.kind for option in iterate_options(options_class)}
        # None stands for "not given": the default is that of the option with the long name.
        fields += [(name, None, types[target] | None) for name, target in short.items()]

    def add_parameters(function: F) -> F:
        """Replace the function's **kwargs by one keyword-only parameter per field."""
        signature = inspect.signature(function)
        parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        names = {parameter.name for parameter in parameters}
        for name, default, hint in fields:
            if name not in names:
                is_required = default is dataclasses.MISSING
                parameters.append(
                    inspect.Parameter(
                        name,
                        inspect.Parameter.KEYWORD_ONLY,
                        annotation=hint,
                        default=inspect.Parameter.empty if is_required else default,
                    )
                )
        function.__signature__ = signature.replace(parameters=parameters)
        return function

    return add_parameters
