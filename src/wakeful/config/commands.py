"""The command line that repeats a call of a tool."""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from wakeful.config.options import default_of
from wakeful.config.tables import to_table


def command_of(verb: str, options: object, *names: str) -> str:
    """Return a verb's command line: its names, and the options that differ from their defaults."""
    defaults = {field.name: default_of(field) for field in dataclasses.fields(options)}  # pyright: ignore[reportArgumentType]
    flags = _flags(to_table(options), to_table(defaults))
    return " ".join(["wakeful", verb, *map(shlex.quote, names), *flags])


def _flags(
    table: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    """Yield the flags of the options that differ from their defaults."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flags(value, defaults.get(name, {}), f"{prefix}{name}.")
        elif value == defaults.get(name) or f"{prefix}{name}" in ("out", "resume"):
            continue
        elif value is False:  # a switch that is on by default is turned off by another flag
            yield f"--{prefix}no_{name}"
        else:
            values = value if isinstance(value, list) else [] if value is True else [value]
            yield shlex.join([f"--{prefix}{name.rstrip('_')}", *map(str, values)])
