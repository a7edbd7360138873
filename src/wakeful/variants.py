"""Variants (routes, depth mixes, normalizers) named by their file and written as one expression.

`resformer(mode="constant", scale=2.0)` names the file `routes/resformer.py`, whose one public class
is called with those options. Nothing else registers a variant: adding the file adds it, deleting
the file deletes it. The expression is read as a syntax tree of calls and literals, never evaluated.
"""

import ast
import inspect
import re
import types
from dataclasses import dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from wakeful.discovery import classes
from wakeful.errors import WakefulError, nearest
from wakeful.roles import HasRoles, Role

_LONGEST = 2_000
"""Characters of an expression; it is a name and a few options."""
_LARGEST = 100_000
"""Bound of a range; it counts layers."""


class Variant(HasRoles):
    """Something that `build` can make from an expression and `str` turns back into it.

    A subclass takes its options as constructor arguments and keeps each under the argument's name.
    Every variant a user may name states `examples` in its own body: expressions worth testing (the
    contract tests run over all of them); a class without them is a base. `neutral` is an expression
    that must reproduce the plain Transformer, where there is one.
    It declares in `roles` which of its parameters other rooms should treat as more than its own.
    """

    examples: tuple[str, ...] = ()
    neutral: str | None = None
    others = Role()

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
    """Return every variant of a folder ("routes", "depth", "normalizers", "ropes") by name."""
    return {
        variant_name(kind): kind
        for kind in classes(folder)
        if issubclass(kind, Variant) and "examples" in vars(kind)
    }


def variant_name(kind: type[Variant]) -> str:
    """Return the name a variant has in expressions: its file's, or in a `base` file its class's."""
    file = re.split(r"\.|__", kind.__module__)[-1]  # an exported model's files are flat
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
    if len(expression) > _LONGEST:
        raise WakefulError(
            f"{folder} expression of {len(expression)} characters, {expression[:40]!r}...: "
            f"at most {_LONGEST} are read"
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise WakefulError(
            f"{folder} expression {expression!r} does not parse ({error}); "
            f"write a name or a call such as {next(iter(variants(folder)))!r}"
        ) from None
    try:
        return _build(folder, tree, expression)
    except RecursionError:
        raise WakefulError(f"{folder} expression {expression!r} is nested too deeply") from None


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
        if keyword.arg in keywords:
            raise WakefulError(f"{node.func.id}: {keyword.arg} is given twice in {expression!r}")
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
        if bounds[2:] == [0] or any(abs(bound) > _LARGEST for bound in bounds):
            raise WakefulError(
                f"range takes bounds up to {_LARGEST} and no step of 0, not {ast.unparse(node)!r}"
            )
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
        if not _fits(value, expected):
            named = expected.__name__ if isinstance(expected, type) else str(expected)
            raise WakefulError(f"{variant_name(kind)}: {name} must be {named}, got {value!r}")
        if expected is float:
            keywords[name] = float(value)


def _fits(value: Any, hint: Any) -> bool:
    """Tell whether a value has the type of an option; choices are the constructor's to name."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is list:
        return type(value) is list and all(_fits(item, inner[0]) for item in value)
    if origin is tuple:
        items = inner[:1] * len(value) if inner[-1] is Ellipsis and type(value) is tuple else inner
        return (
            type(value) is tuple
            and len(value) == len(items)
            and all(_fits(item, one) for item, one in zip(value, items, strict=True))
        )
    if hint is float:
        return type(value) in (int, float)
    if isinstance(hint, type):
        return isinstance(value, hint) and (type(value) is not bool or hint is bool)
    return True


def _options(kind: type[Variant]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(kind).parameters)


def _written(value: object) -> str:
    return str(value) if isinstance(value, Variant) else repr(value)


def _shown(option: inspect.Parameter) -> str:
    if option.default is inspect.Parameter.empty:
        return str(option).split(":")[0]
    return f"{option.name}={option.default!r}"
