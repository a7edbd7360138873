"""Variants (routes, depth mixes, normalizers and others) written as one expression.

`resformer(mode="constant", scale=2.0)` names a class of the folder `routes` and calls it with those
options; `my_module:MyRoute(k=2)` names a class of a user's own module. Nothing registers a variant:
adding the class adds it, deleting the class deletes it. The expression is read as a syntax tree of
calls and literals, never evaluated.
"""

import ast
import inspect
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, Union, dataclass_transform, get_args, get_origin, get_type_hints

from wakeful.errors import WakefulError, did_you_mean
from wakeful.variants.discovery import (
    external_object,
    module_files,
    package_classes,
    qualified_name,
    register_external_class,
)
from wakeful.variants.roles import HasRoles, Role

_LONGEST = 2_000
"""Characters of an expression; it is a name and a few options."""
_LARGEST = 100_000
"""Bound of a range; it counts layers."""
_FOREIGN = re.compile(
    r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|\b([^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*)"""
)
"""A string, which is passed over, or the `module:Name` of a class outside the package."""
_NOUNS = {"depth": "depth mix", "ropes": "RoPE scaling"}
"""Names of a folder's variants where they are not the folder's name without its s."""


class Variant(HasRoles):
    """Base class of objects that `build` makes from an expression, which `str` returns.

    A subclass takes its options as constructor arguments and keeps each under the argument's name.
    Every variant of ours states `examples` in its own body: expressions worth testing (the contract
    tests run over all of them); a class without them is a base. `neutral` is an expression that
    must reproduce the plain Transformer, where there is one. `name` is what expressions call it,
    by default the class's in small letters; a class from outside the package is called by module
    and class. It declares in `roles` which of its parameters other rooms should treat as more than
    its own.
    """

    name: str = ""
    examples: tuple[str, ...] = ()
    neutral: str | None = None
    default_role = Role()

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        register_external_class(cls)

    def __str__(self) -> str:
        parts = []
        for parameter in _options(type(self)).values():
            if not hasattr(self, parameter.name):
                raise WakefulError(
                    f"{type(self).__name__} has no attribute {parameter.name!r}: a variant keeps "
                    "each of its options under the option's name"
                )
            value = getattr(self, parameter.name)
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                parts += [str(item) for item in value]
            elif parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                parts.append(_format_value(value))
            elif value != parameter.default:
                parts.append(f"{parameter.name}={_format_value(value)}")
        name = variant_name(type(self))
        return f"{name}({', '.join(parts)})" if parts else name


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
class FieldVariant(Variant):
    """A variant whose options are its fields: each subclass is a dataclass of named arguments."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        dataclass(kw_only=True, eq=False)(cls)


@cache
def variants_by_name(folder: str) -> dict[str, type[Variant]]:
    """Return every variant of a folder ("routes", "ropes", "optim.rotations" ...) by name."""
    return {
        variant_name(kind): kind
        for kind in package_classes(folder)
        if issubclass(kind, Variant) and "examples" in vars(kind)
    }


def variant_name(kind: type[Variant]) -> str:
    """Return a variant's name in expressions: its module and class, `name`, or its class."""
    return qualified_name(kind) or vars(kind).get("name", kind.__name__.lower())


def build(folder: str, expression: str, *, imports: bool = False) -> Any:
    """Make a fresh variant from an expression.

    `imports` lets modules outside the package be imported where the expression names them: only
    for an expression that the user wrote, never for one that a file brought along.

    Raises:
        WakefulError: the expression does not parse, or names an unknown variant or option, or a
            class in a module that is not imported.
    """
    reading = _Reading(folder, expression, imports, f"{_noun(folder)} expression")
    return reading.read(reading.variant)


def build_call(
    field: str,
    functions: Mapping[str, Callable[..., Any]],
    expression: str,
    *,
    folder: str = "",
    imports: bool = False,
) -> "partial[Any]":
    """Return one of `known`, or a user's class or function, with the options an expression sets.

    For what is made only once its first argument is there, such as an optimizer. An option may be
    a variant of `folder`, or only a plain value where none is given. `imports` is as in `build`.

    Raises:
        WakefulError: as `build`, and if an option is given without its name.
    """
    reading = _Reading(folder, expression, imports, field)
    return reading.read(partial(reading.function, functions))


def expression_of(folder: str, part: Variant) -> str:
    """Return the expression that builds a variant like this one; it is built once, as a check.

    Raises:
        WakefulError: it is not a variant of this folder, or its class cannot be found by its name.
    """
    if not isinstance(part, Variant):
        raise WakefulError(f"{part!r} is neither an expression nor a variant of {folder}")
    expression = str(part)
    try:
        again = build(folder, expression)
    except WakefulError as error:
        raise WakefulError(f"{expression} cannot be written down and read again: {error}") from None
    if type(again) is not type(part):
        raise WakefulError(
            f"{expression} names another class than this object's: define the class once, at the "
            "top of a module"
        )
    return expression


def external_names(expression: str) -> list[str]:
    """Return every `module:Name` in an expression."""
    return [match[2] for match in _FOREIGN.finditer(expression) if match[2] is not None]


def external_module_files(*values: object) -> dict[str, str]:
    """Return the files of the imported modules that the strings of tables name, by module."""
    return module_files(name for text in _strings(values) for name in external_names(text))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(item)


class _Reading:
    """One expression on its way to a variant."""

    def __init__(self, folder: str, expression: str, imports: bool, title: str) -> None:
        self.folder = folder
        self.expression = expression
        self.imports = imports
        self.title = title
        self.foreign: dict[str, str] = {}

    def _stand_in(self, match: re.Match[str]) -> str:
        """Return a Python name that replaces a `module:Name`."""
        if match[1] is not None:
            return match[0]
        name = f"foreign_{len(self.foreign)}_"
        self.foreign[name] = match[2]
        return name

    def read(self, make: Callable[[ast.expr], Any]) -> Any:
        """Return the object that `make` makes of the parsed expression."""
        if len(self.expression) > _LONGEST:
            raise WakefulError(
                f"{self.title} of {len(self.expression)} characters, "
                f"{self.expression[:40]!r}...: at most {_LONGEST} are read"
            )
        try:
            parseable = _FOREIGN.sub(self._stand_in, self.expression)
            tree = ast.parse(parseable.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise WakefulError(
                f"{self.title} {self.expression!r} does not parse ({error}); write a name, or a "
                "call such as name(option=1)"
            ) from None
        try:
            return make(tree)
        except RecursionError:
            raise WakefulError(f"{self.title} {self.expression!r} is nested too deeply") from None

    def variant(self, node: ast.expr, *, inside: bool = False) -> Any:
        """Return the variant that a node names; `inside` says that it is another's option."""
        call, called = self._call(node)
        kind = self._kind(called, inside)
        arguments = [self._value(argument) for argument in call.args]
        keywords = self._keywords(call, _options(kind))
        _check_types(variant_name(kind), kind, keywords)
        try:
            _signature(kind).bind(*arguments, **keywords)
        except TypeError as error:
            raise WakefulError(
                f"{self._unparse(call.func)}: {error} in {self.expression!r}"
            ) from None
        return kind(*arguments, **keywords)

    def function(
        self, functions: Mapping[str, Callable[..., Any]], node: ast.expr
    ) -> "partial[Any]":
        call, called = self._call(node)
        name = self._unparse(call.func)
        target = functions.get(called)
        if called in self.foreign:
            target = external_object(name, imports=self.imports)
            if not callable(target):
                raise WakefulError(f"{self.title}={name!r} is neither a class nor a function")
        if target is None:
            raise WakefulError(
                f"{self.title}={name!r} is not one of {', '.join(functions)}"
                f"{did_you_mean(name, functions)}"
            )
        if call.args:
            raise WakefulError(f"{name}: name the option that is {self._unparse(call.args[0])}")
        options = list(_options(target).items())[1:]  # the first argument is the caller's
        keywords = self._keywords(call, dict(options))
        if called in functions:
            _check_types(name, target, keywords)
        return partial(target, **keywords)

    def _call(self, node: ast.expr) -> tuple[ast.Call, str]:
        if isinstance(node, ast.Name):
            node = ast.Call(func=node, args=[], keywords=[])
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise WakefulError(
                f"in {self.title} {self.expression!r}: {self._unparse(node)!r} is neither a name "
                "nor a call"
            )
        return node, node.func.id

    def _keywords(self, call: ast.Call, options: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
        name = self._unparse(call.func)
        keywords: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg not in options:
                allowed = (
                    f"its options are {', '.join(options)}" if options else "it has no options"
                )
                raise WakefulError(
                    f"{name} has no option {keyword.arg!r}"
                    f"{did_you_mean(str(keyword.arg), options)}; {allowed}"
                )
            if keyword.arg in keywords:
                raise WakefulError(f"{name}: {keyword.arg} is given twice in {self.expression!r}")
            keywords[keyword.arg] = self._value(keyword.value)
        return keywords

    def _kind(self, name: str, inside: bool) -> type[Variant]:
        if name in self.foreign:
            return self._foreign_kind(self.foreign[name])
        kinds = variants_by_name(self.folder)
        if name not in kinds:
            noun, named = _allowed_kinds(self.folder, inside)
            raise WakefulError(
                f"unknown {noun} {name!r}{did_you_mean(name, kinds)}; there are {', '.join(named)}"
            )
        return kinds[name]

    def _foreign_kind(self, name: str) -> type[Variant]:
        kind = external_object(name, imports=self.imports)
        bases = _bases(self.folder)
        if not isinstance(kind, type) or not issubclass(kind, bases):
            reason = "there is no such class" if kind is None else "it is not one"
            raise WakefulError(
                f"{name} must be a subclass of {' or '.join(base.__name__ for base in bases)}, and "
                f"{reason}"
            )
        return kind

    def _value(self, node: ast.expr) -> Any:
        call = node.func if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and isinstance(call, ast.Name) and call.id == "range":
            bounds = [self._value(argument) for argument in node.args]
            if not 1 <= len(bounds) <= 3 or not all(type(bound) is int for bound in bounds):
                raise WakefulError(f"range takes one to three integers, not {ast.unparse(node)!r}")
            if bounds[2:] == [0] or any(abs(bound) > _LARGEST for bound in bounds):
                raise WakefulError(
                    f"range takes bounds up to {_LARGEST} and no step of 0, not "
                    f"{ast.unparse(node)!r}"
                )
            return range(*bounds)
        if self.folder and isinstance(node, ast.Name | ast.Call):
            return self.variant(node, inside=True)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise WakefulError(
                f"in {self.title} {self.expression!r}: {self._unparse(node)!r} is not a plain value"
            ) from None

    def _unparse(self, node: ast.expr) -> str:
        text = ast.unparse(node)
        for name, meant in self.foreign.items():
            text = text.replace(name, meant)
        return text


@cache
def _bases(folder: str) -> tuple[type[Variant], ...]:
    return tuple(
        kind
        for kind in package_classes(folder)
        if issubclass(kind, Variant)
        and "examples" not in vars(kind)
        and not kind.__name__.startswith("_")
    )


def _noun(folder: str) -> str:
    """Return the name of a folder's variants in messages: "scheme" of "quantization.schemes"."""
    return _NOUNS.get(folder, folder.rpartition(".")[2].removesuffix("s"))


def _allowed_kinds(folder: str, inside: bool) -> tuple[str, list[str]]:
    """Return the kind allowed in an expression, or `inside` one as an option, and its names.

    A folder may hold parts of its variants too, such as the grids of schemes.
    """
    noun, kinds, bases = _noun(folder), variants_by_name(folder), _bases(folder)
    mains = tuple(base for base in bases if base.__name__.lower() == noun)
    parts = tuple(base for base in bases if not issubclass(base, mains)) if mains else ()
    if not parts:
        return noun, [name for name, kind in kinds.items() if issubclass(kind, mains or kind)]
    chosen = parts if inside else mains
    named = [name for name, kind in kinds.items() if issubclass(kind, chosen) and name != noun]
    return " or ".join(base.__name__.lower() for base in chosen), named


def _check_types(title: str, kind: Callable[..., Any], keywords: dict[str, Any]) -> None:
    if not keywords:
        return
    try:
        hints = get_type_hints(kind.__init__ if isinstance(kind, type) else kind)
    except NameError as error:
        raise WakefulError(f"the types of {title}'s options cannot be found: {error}") from None
    for name, value in keywords.items():
        expected = hints.get(name)
        if not _fits(value, expected):
            named = expected.__name__ if isinstance(expected, type) else str(expected)
            if get_origin(expected) is Literal:
                named = " or ".join(map(repr, get_args(expected)))
            raise WakefulError(f"{title}: {name} must be {named}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise WakefulError(f"{title}: {name} must be finite, got {value}")
        if expected is float:
            keywords[name] = float(value)


def _fits(value: Any, hint: Any) -> bool:
    """Tell whether a value has the type of an option, or is one of its choices."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType, Literal):
        return any(
            value == option if origin is Literal else _fits(value, option) for option in inner
        )
    if origin is list:
        return type(value) is list and all(_fits(item, inner[0]) for item in value)
    if origin is tuple:
        items = inner[:1] * len(value) if inner[-1] is Ellipsis and type(value) is tuple else inner
        return (
            type(value) is tuple
            and len(value) == len(items)
            and all(_fits(item, option) for item, option in zip(value, items, strict=True))
        )
    if hint is float:
        return type(value) in (int, float)
    if isinstance(hint, type):
        return isinstance(value, hint) and (type(value) is not bool or hint is bool)
    return True


@cache
def _signature(kind: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(kind)


def _options(kind: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(_signature(kind).parameters)


def _format_value(value: object) -> str:
    return str(value) if isinstance(value, Variant) else repr(value)
