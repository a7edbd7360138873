"""The command line that repeats a call of a tool."""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from wakeful.config.options import field_default
from wakeful.config.tables import to_table


def format_command_line(verb: str, options: object, *names: str) -> str:
    """Return the shell command that repeats a call of `verb`, such as "train", with the options
    that are not at their defaults.

    `options` is an instance of the verb's dataclass of options. `names` are the arguments without a
    flag, such as the model to work on.
    """
    defaults = {field.name: field_default(field) for field in dataclasses.fields(options)}  # pyright: ignore[reportArgumentType]
    flags = _format_flags(to_table(options), to_table(defaults))
    return " ".join(["wakeful", verb, *map(shlex.quote, names), *flags])


def _format_flags(
    table: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    """Yield flags with values, such as "--steps 5", for options that differ from their defaults.

    `prefix` is the dotted path of a nested table with a dot at its end, such as the "train." of
    "--train.steps 5". The options out and resume name a folder that exists when the call is
    repeated, and are left out.
    """
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _format_flags(value, defaults.get(name, {}), f"{prefix}{name}.")
        elif value == defaults.get(name) or f"{prefix}{name}" in ("out", "resume"):
            continue
        elif value is False:  # a switch that is on by default
            yield f"--{prefix}no_{name}"
        else:
            values = value if isinstance(value, list) else [value]
            if value is True:
                values = []  # a switch's flag takes no value
            flag = f"--{prefix}{name.rstrip('_')}"  # a field `for_` has the flag --for
            yield shlex.join([flag, *map(str, values)])
