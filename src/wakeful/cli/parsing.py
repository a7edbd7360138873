"""Arguments to typed options, and what `--help` says of them; all of it without torch."""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import tyro

from wakeful.cli.console import LET_IT_SPEAK, another_speaks
from wakeful.config.tables import presets
from wakeful.config.verbs import SHORT, InheritOptions, short_value
from wakeful.errors import WakefulError

SOURCES = (
    "a run directory, a Transformers folder, a GGUF file, smollm2, a hub name or a quantized model"
)
T = TypeVar("T")
_CHOICES = (
    ("routes", "route"),
    ("normalizers", "normalizer"),
    ("depth", "depth"),
    ("norms", "norm"),
    ("placements", "placement"),
)


def leading(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the names before the first option from the rest."""
    for place, argument in enumerate(arguments):
        if argument.startswith("-"):
            return arguments[:place], arguments[place:]
    return arguments, []


def one_model(models: list[str]) -> str:
    """Return the only model that is named."""
    if len(models) != 1:
        raise WakefulError(f"name one model, not {len(models)}: {SOURCES}")
    return models[0]


def with_out(verb: str, models: list[str], options: T) -> T:
    """Return a verb's options with the folder that it writes where none is named."""
    if not models:
        raise WakefulError(f"name a model: {SOURCES}")
    if options.out:  # pyright: ignore[reportAttributeAccessIssue]
        return options
    folder = f"runs/{verb}-{Path(models[0]).name}"
    return dataclasses.replace(options, out=folder)  # pyright: ignore[reportArgumentType]


def asks_for_help(arguments: list[str]) -> bool:
    return bool({"--help", "-h"} & set(arguments))


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
                if "examples" in set(_assigned(node)):
                    stem = file.name.removesuffix(".py")
                    snake = re.sub(r"(?<!^)(?=[A-Z])", "_", node.name).lower()
                    usual = snake if stem == "base" else stem
                    names[node.name] = _named(node) or usual
    for kind, name in names.items():
        options = ", ".join(_options(kind, bodies))
        yield f"{name}({options})" if options else name


def _named(body: ast.ClassDef) -> str:
    """Return the name that a class states in its body, or ""."""
    for node in body.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["name"]:
            return str(ast.literal_eval(node.value))
    return ""


def _assigned(body: ast.ClassDef) -> Iterator[str]:
    for node in body.body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        yield from (target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


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
    plain = [*found.posonlyargs, *found.args][1:]
    missing: list[ast.expr | None] = [None] * (len(plain) - len(found.defaults))
    defaults = [*missing, *found.defaults]
    for argument, default in zip(plain, defaults, strict=True):
        yield _argument(argument, default)
    if found.vararg:
        yield f"*{found.vararg.arg}"
    for argument, default in zip(found.kwonlyargs, found.kw_defaults, strict=True):
        yield _argument(argument, default)


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"


def _without_output(silent: bool) -> contextlib.AbstractContextManager[object]:
    return contextlib.redirect_stdout(io.StringIO()) if silent else contextlib.nullcontext()


def _described(prog: str) -> str:
    verb = prog.split(maxsplit=1)[0]
    from wakeful.cli import VERBS

    text = VERBS[verb]
    if verb in ("train", "compare"):
        text += f"\n\nPresets: {', '.join(presets())}."
        for folder, option in _CHOICES:
            text += f"\n\n--model.{option}: {', '.join(catalog(folder))}."
    if verb == "inherit":
        text += "\n\n" + inspect.cleandoc(InheritOptions.__doc__ or "").split("\n\n", 1)[1]
        text += "\n\n--baseline: " + "; ".join(baselines()) + "."
    return text


def baselines() -> Iterator[str]:
    """Yield the starts that an heir may be compared with, as their table's source names them."""
    source = (resources.files("wakeful") / "growth" / "baselines.py").read_text("utf-8")
    for node in ast.walk(ast.parse(source)):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == "BASELINES":
            assert isinstance(node, ast.AnnAssign)
            assert isinstance(node.value, ast.Dict)
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(value, ast.Call)
                assert key is not None
                yield f"{ast.literal_eval(key)}: {ast.literal_eval(value.args[0])}"
