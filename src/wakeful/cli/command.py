"""A verb's options as a command of cyclopts, which parses arguments, prints help and completes.

Every option is a field of the verb's dataclass. A field of a part is written with dots,
`--train.steps`; `_` and `-` are the same in a name.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from inspect import Parameter as Argument
from inspect import Signature
from itertools import zip_longest
from typing import Annotated, Any, get_args

from cyclopts import App, CycloptsError, Group, Parameter, UnknownOptionError

from wakeful.catalog import FOLDERS, NAMES, check_names
from wakeful.cli.console import OUT, Printer
from wakeful.config.keywords import short_names
from wakeful.config.options import Heading, Option, options_of
from wakeful.config.reading import REFERENCES, SOURCES, Bos
from wakeful.config.rules import forbidden_options
from wakeful.config.tables import TomlTable
from wakeful.errors import WakefulError, nearest
from wakeful.paths import free_folder
from wakeful.variants.plugins import Verb

HELP, HELP_ALL = ("--help", "-h"), ("--help-all", "--help_all")
"""Flags that ask for help on the main options, and on all of them."""
IMPORT = "--import"
"""Option of every verb: modules that may be imported when a folder names them."""
USAGE_WORDS = {
    "MODEL": SOURCES,
    "REFERENCE": REFERENCES,
    "RUN": "the folder of a run, a comparison or an inheritance",
    "CONFIG": "a TOML file, or a preset's name (wakeful presets lists them)",
    "SOURCE": "python-stdlib, a file, folder or glob (text, JSONL, parquet), or hf:NAME",
    "DIR": "a folder to create, or a file NAME.gguf",
    "PRESET": "a preset to print, as a starting point for a TOML file of your own",
    "SHELL": "bash, zsh or fish",
    "PART": "a file to print, which imports nothing but torch",
}
"""Meanings of the words of a usage line."""
_WIDEST = 100
"""Largest width of help, in columns."""
_GROUPS = {heading: Group(heading.value, sort_key=n) for n, heading in enumerate(Heading)}
_IMPORT_OPTION = Option(
    "import", tuple[str, ...], "Modules of your own that a run or a model names, or their files: "
    "ramp.py. Each is imported only if you name it here.", (), None,
)  # fmt: skip
_FLAG = re.compile(r"--[A-Za-z][\w.-]*(=|$)")
"""An option's name, with or without a value."""
_ROW = "--variants."
"""Prefix of an option for one row of a comparison."""


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return True where arguments ask for help."""
    return bool({*HELP, *HELP_ALL} & set(arguments))


def parse(name: str, verb: Verb, arguments: Sequence[str]) -> tuple[list[str], TomlTable]:
    """Parse arguments into names and a table of the options given.

    Raises:
        WakefulError: an option does not exist, or a value is missing or not of its type.
    """
    try:
        options = list_options(verb.options)
        joined = _join_values(options, arguments)
        return command(name, verb, options)(joined, result_action="return_value")
    except CycloptsError as error:
        error.verbose = False
        unknown = isinstance(error, UnknownOptionError)
        more = f" (wakeful {name} --help-all lists the options)" * unknown
        raise WakefulError(f"{error}{more}") from None


def _join_values(options: Iterable[Option], arguments: Sequence[str]) -> list[str]:
    """Join by = an option and a value that cyclopts would not recognize: one that begins with a
    dash, such as - alone, and the "on" that --bos alone means.
    """
    switches = {option.flag for option in options if option.choices == get_args(Bos)}
    joined: list[str] = []
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        follows = bool(joined) and _FLAG.match(joined[-1])
        if follows and argument.startswith("-") and not _FLAG.match(argument):
            joined[-1] += f"={argument}"
        elif argument in switches and following not in get_args(Bos):
            joined.append(f"{argument}=on")
        else:
            joined.append(argument)
    return _drop_repeated(joined)


def _drop_repeated(arguments: Sequence[str]) -> list[str]:
    """Drop every option that is given again later."""
    parts: list[list[str]] = [[]]
    for argument in arguments:
        if _FLAG.match(argument):
            parts.append([])
        parts[-1].append(argument)
    names = [part[0].partition("=")[0].replace("-", "_") for part in parts[1:]]
    last = {name: number for number, name in enumerate(names)}
    latest = [part for n, part in enumerate(parts[1:]) if last[names[n]] == n]
    return [argument for part in [parts[0], *latest] for argument in part]


def command(name: str, verb: Verb, options: Sequence[Option], *, rare: bool = False) -> App:
    """Return a verb as a command that returns its names and the table of the options given.

    With `rare` its help also shows the options that are rarely needed.
    """

    def read(*names: str, **kwargs: Any) -> tuple[list[str], TomlTable]:
        table: TomlTable = {}
        for option in options:
            value = kwargs.get(_key(option))
            if value is not None and option is not _IMPORT_OPTION:
                check_names(option.name, value)
                *parts, last = option.name.split(".")
                reduce(lambda part, name: part.setdefault(name, {}), parts, table)[last] = value
        return list(names), table

    arguments = [_argument(name, verb, option, rare) for option in options]
    if verb.usage:
        arguments.insert(0, Argument("names", Argument.VAR_POSITIONAL, annotation=str))
    read.__signature__ = Signature(arguments)
    return App(
        name=f"wakeful {name}",
        help=_introduction(verb),
        help_format="plaintext",
        help_flags=(),
        version_flags=(),
        console=OUT,
        default_command=read,
        group_arguments=Group("Names", show=False),
        usage=f"Usage: wakeful {' '.join(filter(None, [name, verb.usage]))}"
        + " [options]" * bool(options),
        exit_on_error=False,
        print_error=False,
    )


def list_options(kind: type, default: Any = None) -> list[Option]:
    """Return the options of a dataclass except those that its rules always refuse."""
    refused = forbidden_options(kind)
    options = [option for option in options_of(kind, default) if option.name not in refused]
    return [*options, _IMPORT_OPTION] if options else []


def print_help(name: str, verb: Verb, arguments: Sequence[str], default: Any = None) -> None:
    """Print a verb's help: examples, then the main options, or all of them for `--help-all`."""
    rare = bool({*HELP_ALL} & {*arguments})
    console = Printer(width=min(OUT.width, _WIDEST))
    options = list_options(verb.options, default)
    app = command(name, verb, options, rare=rare)
    app.help_epilogue = _epilogue(name, verb, options, rare)
    app.help_print([], console=console)


def overview(verbs: Mapping[str, Verb], version: str, summary: str) -> App:
    """Return the whole command line, with every verb as a command."""
    app = App(
        name="wakeful", help=f"wakeful {version}: {summary}", help_format="plaintext",
        help_epilogue="wakeful VERB --help: examples, main options; --help-all: every option.",
        help_flags=(), version_flags=(), console=OUT, usage="",
    )  # fmt: skip
    for number, (name, verb) in enumerate(verbs.items()):
        group, _, last = name.rpartition(" ")
        if group and group not in app:
            summaries = " ".join(
                verbs[part].summary for part in verbs if part.startswith(f"{group} ")
            )
            part = App(name=group, help=summaries, help_flags=(), version_flags=(), sort_key=number)
            app.command(part)
        parent = app[group] if group else app
        part = command(name, verb, list_options(verb.options))
        part.sort_key = number
        parent.command(part, name=last)
    return app


def choose_out(verb: str, models: list[str], options: Any) -> Any:
    """Set the folder that a verb writes, where none is given, to a free one under runs/."""
    if not models:
        raise WakefulError(f"name a model: {SOURCES}")
    out = options.out or str(
        free_folder(f"runs/{verb}-{os.path.basename(os.path.abspath(models[0]))}")
    )
    return dataclasses.replace(options, out=out)


def split_imports(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the values of `--import`, which every verb takes, from the other arguments.

    Raises:
        WakefulError: `--import` has no value.
    """
    rest: list[str] = []
    modules: list[str] = []
    target = rest
    for argument in arguments:
        flag, _, value = argument.partition("=")
        if argument.startswith("-"):
            target = modules if flag == IMPORT else rest
        target += [value] * bool(value) if flag == IMPORT else [argument]
    if not modules and any(argument.partition("=")[0] == IMPORT for argument in arguments):
        raise WakefulError(f"{IMPORT} takes modules or files: {_IMPORT_OPTION.description}")
    return rest, modules


def split_row_options(
    arguments: Sequence[str], rows: Sequence[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Split the options for all rows from those for one row, `--variants.NAME.FIELD value`.

    Raises:
        WakefulError: there is no row of that name.
    """
    shared: list[str] = []
    by_row: dict[str, list[str]] = {name: [] for name in rows}
    target = shared
    for argument in arguments:
        if not argument.startswith(_ROW):
            target = shared if argument.startswith("--") else target
            target.append(argument)
            continue
        rest = argument.removeprefix(_ROW)
        name = max((row for row in rows if rest.startswith(f"{row}.")), key=len, default="")
        if not name:
            raise WakefulError(
                f"{argument.partition('=')[0]} names no row"
                f"{nearest(rest.partition('.')[0], rows)}; there are {', '.join(rows)}"
            )
        target = by_row[name]
        target.append(f"--{rest.removeprefix(f'{name}.')}")
    return shared, by_row


def _key(option: Option) -> str:
    """Return the keyword argument of an option: without dots, and no keyword of Python."""
    return f"option_{option.name.replace('.', '__')}"


def _argument(name: str, verb: Verb, option: Option, rare: bool) -> Argument:
    title = f"Rarely needed: {option.section}" if option.section else "Rarely needed"
    names = short_names(verb.options)
    flags = [*(f"--{short}" for short, long in names.items() if long == option.name), option.flag]
    parameter = Parameter(
        name=flags,
        help=option.description.replace("runs/VERB-", f"runs/{name}-"),
        group=_GROUPS[option.group] if option.group else Group(title, sort_key=9),
        show=bool(option.group) or rare,
        show_default=_format_default(option),
        negative=option.negative if option.default is True else "",
        consume_multiple=True,
    )
    required = option.default is dataclasses.MISSING
    return Argument(
        _key(option), Argument.KEYWORD_ONLY, default=Argument.empty if required else None,
        annotation=Annotated[option.kind if required else option.kind | None, parameter],
    )  # fmt: skip


def _format_default(option: Option) -> Any:
    value = option.default
    if value in ("", (), False) or value is dataclasses.MISSING:
        return False
    if isinstance(value, tuple):
        value = " ".join(map(repr, value)) if "" in value else " ".join(map(str, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return lambda _: text


def _introduction(verb: Verb) -> str:
    lines = [verb.summary, ""]
    for line, effect in verb.examples:
        lines += [line, f"    {effect}"]
    meanings = USAGE_WORDS | dict(verb.argument_help)
    words_used = [word.strip("[].") for word in verb.usage.split()]
    return "\n".join([*lines, "", *(f"{word}: {meanings[word]}" for word in words_used)]).rstrip()


def _epilogue(name: str, verb: Verb, options: Sequence[Option], rare: bool) -> str:
    notes = (verb.options.__doc__ or "").split("\n\n")[1:]
    hidden = 0 if rare else sum(option.group is None for option in options)
    more = f"{hidden} more option{'s' * (hidden > 1)}: wakeful {name} --help-all" * bool(hidden)
    paragraphs = [
        *(" ".join(note.split()) for note in notes),
        *_list_names(verb, options, rare),
        more,
    ]
    return "\n\n".join(filter(None, paragraphs))


def _list_names(verb: Verb, options: Iterable[Option], rare: bool) -> Iterator[str]:
    """Yield lists of possible names: those of the verb, then variants by option."""
    if names := ", ".join(verb.names()):
        yield f"{verb.usage.strip('[].').title()}s: {names}"
    for option in options:
        if option.name in FOLDERS and (option.group or rare):
            yield f"{option.flag}: {', '.join(NAMES[FOLDERS[option.name]])}"
