"""Variants (routes, depth mixes, normalizers) named by their file and written as one expression.

`resformer(mode="constant", scale=2.0)` names the file `routes/resformer.py`, whose one public class
is called with those options. Nothing else registers a variant: adding the file adds it, deleting
the file deletes it. The expression is read as a syntax tree of calls and literals, never evaluated.
"""

import ast
import difflib
import importlib
import inspect
import pkgutil
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from wakeful.errors import WakefulError


class Variant:
    """Something that `build` can make from an expression and `str` turns back into it.

    A subclass takes its options as constructor arguments and keeps each under the argument's name.
    Every variant a user may name states `examples` in its own body: expressions worth testing (the
    contract tests run over all of them); a class without them is a base. `neutral` is an expression
    that must reproduce the plain Transformer, where there is one.
    """

    examples: tuple[str, ...] = ()
    neutral: str | None = None

    def __str__(self) -> str:
        parts = []
        for parameter in _options(type(self)).values():
            value = getattr(self, parameter.name)
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                parts += [str(item) for item in value]
            elif parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                parts.append(_written(value))
            elif value != parameter.default:
                parts.append(f"{parameter.name}={_written(value)}")
        return (
            f"{variant_name(type(self))}({', '.join(parts)})" if parts else variant_name(type(self))
        )


@dataclass(frozen=True)
class Entry:
    """One line of a catalogue: the variant's name, its signature and its first sentence."""

    name: str
    signature: str
    summary: str


@cache
def variants(folder: str) -> dict[str, type[Variant]]:
    """Return every variant of a folder (`"routes"`, `"depth"`, `"normalizers"`) by name."""
    package = importlib.import_module(f"wakeful.{folder}")
    found: dict[str, type[Variant]] = {}
    for module_info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")
        found |= {
            variant_name(value): value
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, Variant)
            and value.__module__ == module.__name__
            and "examples" in vars(value)
        }
    return found


def variant_name(kind: type[Variant]) -> str:
    """Return the name a variant has in expressions: its file's, or in a `base` file its class's."""
    file = kind.__module__.rsplit(".", 1)[-1]
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower() if file == "base" else file


def catalogue(folder: str) -> list[Entry]:
    """Return what a user may write for this folder, for help texts and documentation."""
    return [
        Entry(
            name=name,
            signature=", ".join(_shown(option) for option in _options(kind).values()),
            summary=(inspect.getdoc(kind) or "").split("\n", 1)[0],
        )
        for name, kind in variants(folder).items()
    ]


def build(folder: str, expression: str) -> Any:
    """Make a fresh variant from an expression.

    Raises:
        WakefulError: the expression does not parse, or names an unknown variant or option.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise WakefulError(
            f"{folder} expression {expression!r} does not parse ({error}); "
            f"write a name or a call such as {next(iter(variants(folder)))!r}"
        ) from None
    return _build(folder, tree, expression)


def _build(folder: str, node: ast.expr, expression: str) -> Any:
    if isinstance(node, ast.Name):
        node = ast.Call(func=node, args=[], keywords=[])
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise WakefulError(
            f"in {folder} expression {expression!r}: {ast.unparse(node)!r} is no name or call"
        )
    known = variants(folder)
    kind = known.get(node.func.id)
    if kind is None:
        raise WakefulError(
            f"unknown {folder} variant {node.func.id!r}{nearest(node.func.id, known)}; "
            f"there are {', '.join(known)}"
        )
    arguments = [_value(folder, argument, expression) for argument in node.args]
    keywords: dict[str, Any] = {}
    options = _options(kind)
    for keyword in node.keywords:
        if keyword.arg not in options:
            allowed = f"its options are {', '.join(options)}" if options else "it has no options"
            raise WakefulError(
                f"{node.func.id} has no option {keyword.arg!r}{nearest(str(keyword.arg), options)};"
                f" {allowed}"
            )
        keywords[keyword.arg] = _value(folder, keyword.value, expression)
    _check_types(kind, keywords)
    try:
        inspect.signature(kind).bind(*arguments, **keywords)
    except TypeError as error:
        raise WakefulError(f"{node.func.id}: {error} in {expression!r}") from None
    return kind(*arguments, **keywords)


def _value(folder: str, node: ast.expr, expression: str) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        bounds = [_value(folder, argument, expression) for argument in node.args]
        if not 1 <= len(bounds) <= 3 or not all(type(bound) is int for bound in bounds):
            raise WakefulError(f"range takes one to three integers, not {ast.unparse(node)!r}")
        return range(*bounds)
    if isinstance(node, ast.Name | ast.Call):
        return _build(folder, node, expression)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise WakefulError(
            f"in {folder} expression {expression!r}: {ast.unparse(node)!r} is no plain value"
        ) from None


def _check_types(kind: type[Variant], keywords: dict[str, Any]) -> None:
    hints = get_type_hints(kind.__init__)
    for name, value in keywords.items():
        expected = hints.get(name)
        if expected is float and type(value) is int:
            keywords[name] = float(value)
        elif isinstance(expected, type) and type(value) is not expected:
            raise WakefulError(
                f"{variant_name(kind)}: {name} must be {expected.__name__}, got {value!r}"
            )


def _options(kind: type[Variant]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(kind).parameters)


def _written(value: object) -> str:
    return str(value) if isinstance(value, Variant) else repr(value)


def _shown(option: inspect.Parameter) -> str:
    if option.default is inspect.Parameter.empty:
        return str(option).split(":")[0]
    return f"{option.name}={option.default!r}"


def nearest(word: str, known: Any) -> str:
    """Return `" (did you mean 'x'?)"` for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
