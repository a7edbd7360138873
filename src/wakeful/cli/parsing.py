"""Arguments to typed options, by the reader of TOML; all of it without torch."""

import contextlib
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from wakeful.cli.catalog import check_name
from wakeful.cli.console import another_speaks
from wakeful.cli.help import IMPORT, asks_for_help, print_help
from wakeful.config.options import Option, options_of
from wakeful.config.tables import Table
from wakeful.config.verbs import SHORT, SOURCES, Bos, InheritOptions, filled
from wakeful.errors import WakefulError, nearest
from wakeful.paths import free_folder

_ROW = "--variants."
"""Prefix of an option for one row of a comparison."""
_FLAG = re.compile(r"--[A-Za-z][\w.-]*")
"""The form of an option's name."""
_OFF = "off"


def trusted_modules(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the values of `--import`, which every verb takes, from the other arguments.

    Raises:
        WakefulError: it has no value.
    """
    rest: list[str] = []
    modules: list[str] = []
    into = rest
    for argument in arguments:
        flag, _, value = argument.partition("=")
        if argument.startswith("-"):
            into = modules if flag == IMPORT.flag else rest
        into += [value] * bool(value) if flag == IMPORT.flag else [argument]
    if not modules and any(each.partition("=")[0] == IMPORT.flag for each in arguments):
        raise WakefulError(f"{IMPORT.flag} takes modules or files: {IMPORT.words}")
    return rest, modules


def leading(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the names before the first option from the rest."""
    flags = (n for n, argument in enumerate(arguments) if argument.startswith("-"))
    place = next(flags, len(arguments))
    return arguments[:place], arguments[place:]


def with_out(verb: str, models: list[str], options: Any) -> Any:
    """Return a verb's options with the folder that it writes, a free one where none is named."""
    if not models:
        raise WakefulError(f"name a model: {SOURCES}")
    out = options.out or str(
        free_folder(f"runs/{verb}-{os.path.basename(os.path.abspath(models[0]))}")
    )
    return dataclasses.replace(options, out=out)


def read(kind: type, arguments: list[str], prog: str) -> tuple[list[str], Any]:
    """Return the names before the first option, and the options."""
    names, rest = leading(arguments)
    return names, parse(kind, rest, prog)


def parse(kind: type, arguments: list[str], prog: str, default: Any = None) -> Any:
    """Return the options of this kind that arguments describe, or print their help and end.

    Raises:
        WakefulError: there is no such option, or a value is missing or not of its type.
    """
    if asks_for_help(arguments):
        if not another_speaks():
            print_help(kind, prog, arguments, default)
        sys.exit(0)
    verb = prog.split(maxsplit=1)[0]
    options = {option.flag: option for option in options_of(kind, default)}
    for short, target in SHORT.items() if kind is InheritOptions else ():
        options[f"--{short}"] = dataclasses.replace(options[f"--{target}"], name=short)
    given: Table = {}
    for name, values in _given(arguments, options, verb):
        option = options[name]
        check_name(option, values)
        *parts, last = option.name.split(".")
        functools.reduce(lambda at, part: at.setdefault(part, {}), parts, given)[last] = _value(
            option, values
        )
    for option in options.values():
        if option.default is dataclasses.MISSING and option.name not in given:
            raise WakefulError(f"{option.flag} is missing: {option.words}")
    return filled(kind, given, default)


def _given(
    arguments: list[str], options: Mapping[str, Option], verb: str
) -> list[tuple[str, list[str]]]:
    """Return the options in their order, a switch that is turned off as having the value off."""
    negatives = {each.negative: each.flag for each in options.values() if each.kind is bool}
    found: list[tuple[str, list[str]]] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not _FLAG.fullmatch(name):
            if not found:
                raise WakefulError(f"{argument!r} follows no option")
            found[-1][1].append(argument)
            continue
        name = f"--{name[2:].replace('-', '_')}"
        if name in negatives and not equals:
            found.append((negatives[name], [_OFF]))
        elif name in options:
            found.append((name, [value] if equals else []))
        else:
            raise WakefulError(
                f"there is no option {name}{_close(name, [*options, *negatives])}; wakeful {verb} "
                "--help-all lists them"
            )
    return found


def _value(option: Option, values: list[str]) -> Any:
    """Return an option's value; a text that is not of its type stays a text."""
    if option.many:
        return [_typed(option.each, each) for each in values]
    if option.kind is bool:
        if values in ([], [_OFF]):
            return not values
        raise WakefulError(f"{option.flag} is a switch and takes no value, got {values[-1]!r}")
    if not values and option.choices == get_args(Bos):
        return "on"
    if len(values) != 1:
        raise WakefulError(f"{option.flag} takes one value, got {' '.join(values) or 'none'}")
    return _typed(option.kind, values[0])


def _typed(kind: Any, text: str) -> Any:
    if kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _close(name: str, flags: Sequence[str]) -> str:
    """Return the hint to an option: of the same last word in another part, or else the nearest."""
    same = [flag for flag in flags if flag.rpartition(".")[2] == name.removeprefix("--")]
    return f" (did you mean {' or '.join(same[:3])}?)" if same else nearest(name, flags)


def named_rows(arguments: list[str], rows: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Split the options for all rows from those of one, `--variants.NAME.FIELD value`.

    Raises:
        WakefulError: there is no row of that name.
    """
    shared: list[str] = []
    own: dict[str, list[str]] = {name: [] for name in rows}
    into = shared
    for given in arguments:
        argument = given
        if argument.startswith("--"):
            into = shared
        if argument.startswith(_ROW):
            rest = argument.removeprefix(_ROW)
            fitting = [name for name in rows if rest.startswith(f"{name}.")]
            if not fitting:
                raise WakefulError(
                    f"{argument.partition('=')[0]} names no row"
                    f"{nearest(rest.partition('.')[0], rows)}; there are {', '.join(rows)}"
                )
            name = max(fitting, key=len)
            into = own[name]
            argument = f"--{rest.removeprefix(f'{name}.')}"
        into.append(argument)
    return shared, own
