"""Arguments to typed options, and what `--help` says of them; all of it without torch."""

import ast
import contextlib
import dataclasses
import inspect
import io
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import tyro

from wakeful.cli.console import LET_IT_SPEAK, another_speaks
from wakeful.config.model import VARIANTS
from wakeful.config.tables import presets
from wakeful.config.verbs import SHORT, SOURCES, InheritOptions, short_value
from wakeful.errors import WakefulError

_ROW = "--variants."
"""What an option for one row of a comparison begins with."""


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


def asks_for_help(arguments: list[str]) -> bool:
    return bool({"--help", "-h"} & set(arguments))


def read(kind: type, arguments: list[str], prog: str, default: Any = None) -> tuple[list[str], Any]:
    """Return the names before the first option, and the options."""
    names, rest = leading(arguments)
    return names, parse(kind, rest, prog, default)


def parse(kind: type, arguments: list[str], prog: str, default: Any = None) -> Any:
    """Return the options of this kind that arguments describe, or end with what is wrong."""
    extra = {} if default is None else {"default": default}
    arguments = spelled_out(prog.split(maxsplit=1)[0], arguments)
    read = partial(tyro.cli, kind, prog=f"wakeful {prog}", args=arguments, use_underscores=True)
    shown = io.StringIO()
    silent = another_speaks()
    described = _described(prog) if asks_for_help(arguments) else ""
    try:
        with contextlib.redirect_stderr(shown), _without_output(silent):
            return read(description=described, **extra)
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
                    f"{argument.partition('=')[0]} names no row; there are {', '.join(rows)}"
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


def catalog(folder: str) -> Iterator[str]:
    """Yield what a user may write for a folder of variants, read from its source.

    `variants.catalog` says the same of the imported classes, and needs torch for that.
    """
    bodies: dict[str, ast.ClassDef] = {}
    names: dict[str, str] = {}
    for file in sorted((resources.files("wakeful") / folder).iterdir(), key=lambda f: f.name):
        if not file.name.endswith(".py"):
            continue
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                bodies[node.name] = node
                said = dict(_assigned(node))
                if "examples" in said:
                    name = said.get("name")
                    names[node.name] = node.name.lower() if name is None else ast.literal_eval(name)
    for kind, name in names.items():
        options = ", ".join(_options(kind, bodies))
        yield f"{name}({options})" if options else name


def _assigned(body: ast.ClassDef | ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a body gives a value, and the values."""
    for node in body.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield ast.unparse(target), node.value


def _options(kind: str, bodies: dict[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the options of a class's constructor, or of the first base's that has one."""
    body = bodies.get(kind)
    if body is None:
        return
    for node in body.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield from _arguments(node.args)
            return
    for base in body.bases:
        yield from _options(ast.unparse(base), bodies)


def _arguments(found: ast.arguments) -> Iterator[str]:
    def told(names: list[ast.arg], defaults: Sequence[ast.expr | None]) -> Iterator[str]:
        for argument, default in zip(names, defaults, strict=True):
            yield argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"

    plain = [*found.posonlyargs, *found.args][1:]
    yield from told(plain, [None] * (len(plain) - len(found.defaults)) + found.defaults)
    if found.vararg:
        yield f"*{found.vararg.arg}"
    yield from told(found.kwonlyargs, found.kw_defaults)


def _without_output(silent: bool) -> contextlib.AbstractContextManager[object]:
    return contextlib.redirect_stdout(io.StringIO()) if silent else contextlib.nullcontext()


def _described(prog: str) -> str:
    verb = prog.split(maxsplit=1)[0]
    from wakeful.cli import VERBS

    text = VERBS[verb]
    if verb in ("train", "compare"):
        text += f"\n\nPresets: {', '.join(presets())}."
        for option, folder in VARIANTS.items():
            text += f"\n\n--model.{option}: {', '.join(catalog(folder))}."
    if verb == "inherit":
        text += "\n\n" + inspect.cleandoc(InheritOptions.__doc__ or "").split("\n\n", 1)[1]
        text += "\n\n--baseline: " + "; ".join(baselines()) + "."
    return text


def baselines() -> Iterator[str]:
    """Yield the starts that an heir may be compared with, as their table's source names them."""
    source = (resources.files("wakeful") / "growth" / "baselines.py").read_text("utf-8")
    table = dict(_assigned(ast.parse(source)))["BASELINES"]
    assert isinstance(table, ast.Dict)
    for key, value in zip(table.keys, table.values, strict=True):
        assert isinstance(value, ast.Call)
        assert key is not None
        yield f"{ast.literal_eval(key)}: {ast.literal_eval(value.args[0])}"
