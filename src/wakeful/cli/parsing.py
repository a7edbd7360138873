"""Arguments to typed options; all of it without torch, and help without the parser too."""

import contextlib
import dataclasses
import io
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wakeful.cli.console import LET_IT_SPEAK, another_speaks
from wakeful.cli.help import asks_for_help, print_help
from wakeful.config.options import Option, options_of
from wakeful.config.verbs import SHORT, SOURCES, short_value
from wakeful.errors import WakefulError, nearest

_ROW = "--variants."
"""What an option for one row of a comparison begins with."""
_FLAG = re.compile(r"--[A-Za-z][\w.-]*")
"""What is taken for an option's name."""


def leading(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the names before the first option from the rest."""
    for place, argument in enumerate(arguments):
        if argument.startswith("-"):
            return arguments[:place], arguments[place:]
    return arguments, []


def with_out(verb: str, models: list[str], options: Any) -> Any:
    """Return a verb's options with the folder that it writes where none is named."""
    if not models:
        raise WakefulError(f"name a model: {SOURCES}")
    return dataclasses.replace(options, out=options.out or f"runs/{verb}-{Path(models[0]).name}")


def read(kind: type, arguments: list[str], prog: str, default: Any = None) -> tuple[list[str], Any]:
    """Return the names before the first option, and the options."""
    names, rest = leading(arguments)
    return names, parse(kind, rest, prog, default)


def parse(kind: type, arguments: list[str], prog: str, default: Any = None) -> Any:
    """Return the options of this kind that arguments describe, or end with what is wrong."""
    silent = another_speaks()
    if asks_for_help(arguments):
        if not silent:
            print_help(kind, prog, arguments, default)
        sys.exit(0)
    arguments = spelled_out(prog.split(maxsplit=1)[0], arguments)
    check_words(options_of(kind, default), arguments, prog)
    default = _of_its_tokenizer(default, arguments)
    import tyro

    extra = {} if default is None else {"default": default}
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return tyro.cli(
                kind, prog=f"wakeful {prog}", args=arguments, use_underscores=True, **extra
            )
    except SystemExit as ended:
        # Tyro frames what a part's own checks object to, and hides it behind this.
        behind = ended.__context__
        while behind is not None and not isinstance(behind, WakefulError):
            behind = behind.__context__
        if behind is not None:
            raise behind from None
        if not silent:
            sys.stderr.write(shown.getvalue())
        elif ended.code:
            time.sleep(LET_IT_SPEAK)
        raise


def _of_its_tokenizer(default: Any, arguments: list[str]) -> Any:
    """Return the defaults without the size of a tokenizer to train where one is given."""
    given = {argument.partition("=")[0].replace("-", "_") for argument in arguments}
    if not hasattr(default, "data") or "__data.tokenizer" not in given:
        return default
    size = type(default.data).vocab_size
    return dataclasses.replace(default, data=dataclasses.replace(default.data, vocab_size=size))


def check_words(options: Iterator[Option], arguments: list[str], prog: str) -> None:
    """Raise `WakefulError` for an option that there is not, or a value that is not on its list."""
    flags = {option.flag: option for option in options}
    flags |= {option.negative: option for option in flags.values() if option.kind is bool}
    option: Option | None = None
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if _FLAG.fullmatch(name):
            name = f"--{name[2:].replace('-', '_')}"
            if name not in flags:
                verb = prog.split(maxsplit=1)[0]
                short = [f"--{each}" for each in SHORT] if verb == "inherit" else []
                raise WakefulError(
                    f"there is no option {name}{_close(name, [*flags, *short])}; wakeful {verb} "
                    "--help-all lists them"
                )
            option = flags[name]
            if not equals:
                continue
        else:
            value = argument
        choices = option.choices if option else ()
        if option and choices and value not in choices:
            raise WakefulError(
                f"{option.flag} must be one of {', '.join(choices)}, got {value!r}"
                f"{nearest(value, choices)}"
            )


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


def spelled_out(verb: str, arguments: list[str]) -> list[str]:
    """Return the arguments with short and older names of options in full.

    Raises:
        WakefulError: two names set one thing.
    """
    found: list[str] = []
    said: dict[str, str] = {}
    implied: dict[str, str] = {}
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        option = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
        after = arguments[place + 1] if place + 1 < len(arguments) else "-"
        if option == "bos" and not equals and after.startswith("-"):
            found += ["--bos", "on"]
        elif option in ("no_bos", "nobos"):
            found += ["--bos", "off"]
        elif verb == "inherit" and option:
            target, *others = SHORT.get(option, (option,))
            if said.setdefault(target, name) != name:
                raise WakefulError(f"{said[target]} and {name} both set {target}: give one")
            found.append(f"--{target}{equals}{value}")
            for other in others:
                with contextlib.suppress(ValueError):  # which the first one's value says better
                    implied[other] = str(short_value(other, option, value if equals else after))
        else:
            found.append(argument)
    for other, value in implied.items():
        found += [] if other in said else [f"--{other}", value]
    return found
