"""A verb's options as a command of cyclopts, which parses arguments, prints help and completes.

Every option is a field of the verb's dataclass. A field of a part is written with dots,
`--train.steps`; `_` and `-` are the same in a name.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import Parameter as Argument
from inspect import Signature
from itertools import zip_longest
from typing import Annotated, Any, get_args

from cyclopts import App, CycloptsError, Group, Parameter, UnknownOptionError

from wakeful.catalog import FOLDERS, NAMES, check_names
from wakeful.cli.console import OUT, Printer
from wakeful.config.keywords import short_names
from wakeful.config.options import Heading, Option, iterate_options
from wakeful.config.reading import REFERENCES, SOURCES, Bos
from wakeful.config.rules import forbidden_options
from wakeful.config.tables import TomlTable
from wakeful.errors import WakefulError
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


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return True where arguments ask for help."""
    return bool({*HELP, *HELP_ALL} & set(arguments))


def parse_arguments(name: str, verb: Verb, arguments: Sequence[str]) -> tuple[list[str], TomlTable]:
    """Parse a verb's arguments into the names (models, runs ...) and a table of the options given.

    Raises:
        WakefulError: an option does not exist, or a value is missing or not of its type.
    """
    try:
        options = list_options(verb.options)
        command = build_command(name, verb, options)
        return command(_join_values(options, arguments), result_action="return_value")
    except CycloptsError as error:
        error.verbose = False  # a verbose message is for developers: it names functions
        is_unknown = isinstance(error, UnknownOptionError)
        hint = f" (wakeful {name} --help-all lists the options)" if is_unknown else ""
        raise WakefulError(f"{error}{hint}") from None


def _join_values(options: Iterable[Option], arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with a value joined to its option where cyclopts would misread it.

    A value that begins with a dash, such as "-" alone, is joined to its option: `--prompt=-`. A
    `--bos` without a value becomes `--bos=on`.
    """
    # Only --bos has these choices: auto, on and off.
    bos_flags = {option.flag for option in options if option.choices == get_args(Bos)}
    joined: list[str] = []
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        follows_flag = bool(joined) and "=" not in joined[-1] and _FLAG.match(joined[-1])
        if follows_flag and argument.startswith("-") and not _FLAG.match(argument):
            joined[-1] += f"={argument}"
        elif argument in bos_flags and following not in get_args(Bos):
            joined.append(f"{argument}=on")
        else:
            joined.append(argument)
    return joined


def build_command(name: str, verb: Verb, options: Sequence[Option], *, rare: bool = False) -> App:
    """Return a verb as a cyclopts command with these options.

    The command returns the verb's names (models, runs ...) and a table of the options given, in
    which `--train.steps` is the entry "steps" of the table "train". With `rare` the command's help
    also shows the options that are rarely needed.
    """

    def collect_options(*names: str, **kwargs: Any) -> tuple[list[str], TomlTable]:
        """Return the names and a table of the options that were given."""
        table: TomlTable = {}
        for option in options:
            value = kwargs.get(_keyword_of(option))
            if value is None or option is _IMPORT_OPTION:  # `split_imports` has read --import
                continue
            check_names(option.name, value)
            *parents, field = option.name.split(".")
            subtable = table
            for parent in parents:
                subtable = subtable.setdefault(parent, {})
            subtable[field] = value
        return list(names), table

    arguments = [_make_argument(name, verb, option, rare) for option in options]
    if verb.usage:
        arguments.insert(0, Argument("names", Argument.VAR_POSITIONAL, annotation=str))
    collect_options.__signature__ = Signature(arguments)  # cyclopts reads the options off it
    usage_words = ["wakeful", name, verb.usage, "[options]" if options else ""]
    return App(
        name=f"wakeful {name}",
        help=_format_introduction(verb),
        help_format="plaintext",
        help_flags=(),
        version_flags=(),
        console=OUT,
        default_command=collect_options,
        group_arguments=Group("Names", show=False),
        usage=f"Usage: {' '.join(filter(None, usage_words))}",
        exit_on_error=False,
        print_error=False,
    )


def list_options(kind: type) -> list[Option]:
    """Return an option for each field of the dataclass `kind`, except fields that its rules always
    refuse, and `--import` as the last option. Without fields there are no options.
    """
    refused = forbidden_options(kind)
    options = [option for option in iterate_options(kind) if option.name not in refused]
    return [*options, _IMPORT_OPTION] if options else []


def print_help(name: str, verb: Verb, arguments: Sequence[str]) -> None:
    """Print a verb's help: examples, then the main options, or all of them for `--help-all`."""
    rare = bool({*HELP_ALL} & {*arguments})
    console = Printer(width=min(OUT.width, _WIDEST))
    options = list_options(verb.options)
    app = build_command(name, verb, options, rare=rare)
    app.help_epilogue = _format_epilogue(name, verb, options, rare)
    app.help_print([], console=console)


def build_overview(
    verbs: Mapping[str, Verb], version: str, summary: str, *, with_options: bool = False
) -> App:
    """Return the whole command line as one cyclopts app, with every verb as a command.

    The commands have their options only `with_options`, because building all options takes time.
    """
    app = App(
        name="wakeful", help=f"wakeful {version}: {summary}", help_format="plaintext",
        help_epilogue="wakeful VERB --help: examples, main options; --help-all: every option.",
        help_flags=(), version_flags=(), console=OUT, usage="",
    )  # fmt: skip
    for number, (name, verb) in enumerate(verbs.items()):
        command = build_command(name, verb, list_options(verb.options) if with_options else [])
        command.sort_key = number
        app.command(command, name=name)
    return app


def choose_out(verb: str, models: list[str], options: Any) -> Any:
    """Return a copy of `options` with an output folder in `out`: the one given, else
    runs/VERB-MODEL, named after the first model. If that exists, -2, -3 ... is appended.

    Raises:
        WakefulError: no model is named.
    """
    if not models:
        raise WakefulError(f"name a model: {SOURCES}")
    model_name = os.path.basename(os.path.abspath(models[0])).removesuffix(".gguf")
    out = options.out or str(free_folder(f"runs/{verb}-{model_name}"))
    return dataclasses.replace(options, out=out)


def split_imports(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into those without `--import`, and the modules that `--import` names: every
    word up to the next option (`--import a.py b.py`), or `--import=a.py`.

    Raises:
        WakefulError: `--import` has no value.
    """
    rest: list[str] = []
    modules: list[str] = []
    target = rest  # gets the words up to the next option
    for argument in arguments:
        flag, _, value = argument.partition("=")
        if argument.startswith("-"):
            target = modules if flag == IMPORT else rest
        if flag != IMPORT:
            target.append(argument)
        elif value:
            target.append(value)
    if not modules and any(argument.partition("=")[0] == IMPORT for argument in arguments):
        raise WakefulError(f"{IMPORT} takes modules or files: {_IMPORT_OPTION.description}")
    return rest, modules


def _keyword_of(option: Option) -> str:
    """Return an option's name as a keyword argument: without dots, and no keyword of Python."""
    return f"option_{option.name.replace('.', '__')}"


def _make_argument(name: str, verb: Verb, option: Option, rare: bool) -> Argument:
    """Return an option as a keyword argument that cyclopts parses and shows in the verb's help.

    An option without a group is rarely needed: the help shows it only with `rare`.
    """
    long_names = short_names(verb.options)
    short_flags = [f"--{short}" for short, long in long_names.items() if long == option.name]
    if option.group:
        group = _GROUPS[option.group]
    else:
        section = f": {option.section}" if option.section else ""
        group = Group(f"Rarely needed{section}", sort_key=9)  # after the main groups
    parameter = Parameter(
        name=[*short_flags, option.flag],
        help=option.description.replace("runs/VERB-", f"runs/{name}-"),
        group=group,
        show=bool(option.group) or rare,
        show_default=_format_default(option),
        negative=option.negative if option.default is True else "",  # the flag that turns it off
        consume_multiple=True,
    )
    keyword = _keyword_of(option)
    if option.default is dataclasses.MISSING:  # a required option
        return Argument(
            keyword, Argument.KEYWORD_ONLY, annotation=Annotated[option.kind, parameter]
        )
    # None marks an option that was not given; the dataclass has the default.
    annotation = Annotated[option.kind | None, parameter]
    return Argument(keyword, Argument.KEYWORD_ONLY, default=None, annotation=annotation)


def _format_default(option: Option) -> Any:
    """Return an option's default as help shows it, as a function that cyclopts calls; False if help
    shows none.
    """
    value = option.default
    if value in ("", (), False) or value is dataclasses.MISSING:  # 0 equals False
        return False
    if isinstance(value, tuple):
        format_item = repr if "" in value else str  # '' can be seen only in quotes
        value = " ".join(map(format_item, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return lambda _: text


def _format_introduction(verb: Verb) -> str:
    """Format the start of a verb's help: its summary, its examples with their effects, and the
    meaning of every word of its usage line.
    """
    lines = [verb.summary, ""]
    for command_line, effect in verb.examples:
        lines += [command_line, f"    {effect}"]
    meanings = USAGE_WORDS | dict(verb.argument_help)
    words_used = [word.strip("[].") for word in verb.usage.split()]
    return "\n".join([*lines, "", *(f"{word}: {meanings[word]}" for word in words_used)]).rstrip()


def _format_epilogue(name: str, verb: Verb, options: Sequence[Option], rare: bool) -> str:
    """Format the end of a verb's help: notes from the docstring of its options, the names that
    arguments may take, and, without `rare`, how many options are not shown.
    """
    notes = (verb.options.__doc__ or "").split("\n\n")[1:]  # without the summary
    paragraphs = [" ".join(note.split()) for note in notes]
    paragraphs += _list_names(verb, options, rare)
    hidden = 0 if rare else sum(option.group is None for option in options)
    if hidden:
        plural = "s" if hidden > 1 else ""
        paragraphs.append(f"{hidden} more option{plural}: wakeful {name} --help-all")
    return "\n\n".join(filter(None, paragraphs))


def _list_names(verb: Verb, options: Iterable[Option], rare: bool) -> Iterator[str]:
    """Yield a line with the names that the verb's arguments may have. Then yield, for each option
    whose value names a variant of one of the `FOLDERS`, a line with these names.

    An option without a group is rarely needed: it has a line only with `rare`.
    """
    if names := ", ".join(verb.names()):
        yield f"{verb.usage.strip('[].').title()}s: {names}"
    for option in options:
        if option.name in FOLDERS and (option.group or rare):
            yield f"{option.flag}: {', '.join(NAMES[FOLDERS[option.name]])}"
