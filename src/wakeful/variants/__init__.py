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
    package_classes,
    qualified_name,
    register_external_class,
)
from wakeful.variants.roles import HasRoles, Role

_LONGEST = 2_000
"""Most characters of an expression; it is a name and a few options."""
_LARGEST = 100_000
"""Largest bound of a range; it counts layers."""
_FOREIGN = re.compile(
    r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|\b([^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*)"""
)
"""A string, which is passed over, or the `module:Name` of a class outside the package."""
_NOUNS = {"depth": "depth mix", "ropes": "RoPE scaling"}
"""Names of a folder's variants where they are not the folder's name without its s."""


class Variant(HasRoles):
    """Base class of objects that `build` makes from an expression, which `str` returns.

    A subclass takes its options as constructor arguments and keeps each under the argument's name.
    Every variant of wakeful has `examples` in its class body: expressions worth testing (the
    contract tests run over all of them); a class without them is a base. `neutral` is an expression
    that must reproduce the plain Transformer, if there is one. `name` is the name in expressions,
    by default the class's in small letters; a class from outside the package is named by module
    and class. `roles` declares parameters that optimizers, initialization or quantization must
    treat in a special way.
    """

    name: str = ""
    examples: tuple[str, ...] = ()
    neutral: str | None = None
    default_role = Role()

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        register_external_class(cls)

    def __str__(self) -> str:
        """Return the expression that builds this variant, without the options that have their
        default values.

        Raises:
            WakefulError: the object has no attribute with the name of one of its options.
        """
        parts = []
        for parameter in _options(type(self)).values():
            if not hasattr(self, parameter.name):
                raise WakefulError(
                    f"{type(self).__name__} has no attribute {parameter.name!r}: a variant keeps "
                    "each of its options under the option's name"
                )
            value = getattr(self, parameter.name)
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:  # *parts, other variants
                parts += [str(item) for item in value]
            elif parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:  # written without name
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
    """Return the classes of all variants of a folder ("routes", "ropes", "optim.rotations" ...) by
    the names that they have in expressions.

    A base class, which has no `examples` in its own class body, is left out.
    """
    return {
        variant_name(kind): kind
        for kind in package_classes(folder)
        if issubclass(kind, Variant) and "examples" in vars(kind)
    }


def variant_name(kind: type[Variant]) -> str:
    """Return a variant's name in expressions: `module:Class` for a class from outside the package,
    else its `name`, else the class's name in small letters.
    """
    return qualified_name(kind) or vars(kind).get("name", kind.__name__.lower())


def build(folder: str, expression: str, *, imports: bool = False) -> Any:
    """Build a variant of a folder ("routes" ...) from an expression, such as "resformer(scale=2)".

    `imports` allows importing modules outside the package that the expression names: only for an
    expression that the user wrote, never for one that was read from a file.

    Raises:
        WakefulError: the expression does not parse, or names an unknown variant or option, or a
            class in a module that is not imported.
    """
    parser = _ExpressionParser(folder, expression, imports, f"{_folder_noun(folder)} expression")
    return parser.parse(parser.build_variant)


def build_call(
    field: str,
    functions: Mapping[str, Callable[..., Any]],
    expression: str,
    *,
    folder: str = "",
    imports: bool = False,
) -> "partial[Any]":
    """Return a partial of the function that an expression names, with the options that it sets.

    The function is one of `functions`, or a user's class or function (`module:Name`). The caller
    passes its first argument, such as the parameters of an optimizer. `field` names the setting in
    errors.

    Args:
        folder: subpackage whose variants the options may be, such as "optim.rotations"; without one
            all options are plain values.
        imports: whether modules outside the package that the expression names are imported: only
            for an expression that the user wrote, never for one that was read from a file.

    Raises:
        WakefulError: as `build`, and if an option is given without its name.
    """
    parser = _ExpressionParser(folder, expression, imports, field)
    return parser.parse(partial(parser.bind_function, functions))


def expression_of(folder: str, part: Variant) -> str:
    """Return the expression that builds a variant like `part`, after building it once as a check.

    Raises:
        WakefulError: `part` is not a variant of this folder, or the expression does not name its
            class.
    """
    if not isinstance(part, Variant):
        raise WakefulError(f"{part!r} is neither an expression nor a variant of {folder}")
    expression = str(part)
    try:
        rebuilt = build(folder, expression)
    except WakefulError as error:
        raise WakefulError(f"{expression} cannot be written down and read again: {error}") from None
    if type(rebuilt) is not type(part):
        raise WakefulError(
            f"{expression} names another class than this object's: define the class once, at the "
            "top of a module"
        )
    return expression


def external_names(expression: str) -> list[str]:
    """Return every `module:Name` in an expression, outside of strings."""
    return [match[2] for match in _FOREIGN.finditer(expression) if match[2] is not None]


class _ExpressionParser:
    """Parser of one expression; `title` names the expression in errors.

    Python cannot parse `module:Name`, so each is replaced by a Python name; `external` has the
    originals by these names.
    """

    def __init__(self, folder: str, expression: str, imports: bool, title: str) -> None:
        """Store what to parse: an expression with variants of a folder, which may have modules
        imported if `imports`; `title` names it in errors.
        """
        self.folder = folder
        self.expression = expression
        self.imports = imports
        self.title = title
        self.external: dict[str, str] = {}

    def _replace_external(self, match: re.Match[str]) -> str:
        """Return the text that replaces a match of `_FOREIGN`: a string or a `module:Name`.

        A string stays. A `module:Name`, which Python cannot parse, becomes a new Python name, under
        which it is kept in `external`.
        """
        if match[1] is not None:  # a string
            return match[0]
        name = f"external_{len(self.external)}_"
        self.external[name] = match[2]
        return name

    def parse(self, build_from: Callable[[ast.expr], Any]) -> Any:
        """Parse the expression, and return what `build_from` makes of its syntax tree.

        Raises:
            WakefulError: the expression is too long, does not parse, or is nested too deeply.
        """
        if len(self.expression) > _LONGEST:
            raise WakefulError(
                f"{self.title} of {len(self.expression)} characters, "
                f"{self.expression[:40]!r}...: at most {_LONGEST} are read"
            )
        try:
            # A `module:Name` is no Python: it is replaced by a Python name.
            parseable = _FOREIGN.sub(self._replace_external, self.expression)
            tree = ast.parse(parseable.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise WakefulError(
                f"{self.title} {self.expression!r} does not parse ({error}); write a name, or a "
                "call such as name(option=1)"
            ) from None
        try:
            return build_from(tree)
        except RecursionError:
            raise WakefulError(f"{self.title} {self.expression!r} is nested too deeply") from None

    def build_variant(self, node: ast.expr, *, is_option: bool = False) -> Any:
        """Build the variant that a syntax node names, with the options that the node gives it.

        `is_option` is True where it is an option of another variant: an error message for an
        unknown name then lists other names.

        Raises:
            WakefulError: the class or an option is unknown, or an option has another type.
        """
        call, name = self._as_call(node)
        variant_class = self._find_class(name, is_option)
        arguments = [self._evaluate(argument) for argument in call.args]
        keywords = self._evaluate_keywords(call, _options(variant_class))
        _check_types(variant_name(variant_class), variant_class, keywords)
        try:
            _signature(variant_class).bind(*arguments, **keywords)
        except TypeError as error:  # an argument is missing, or there are too many
            raise WakefulError(
                f"{self._unparse(call.func)}: {error} in {self.expression!r}"
            ) from None
        return variant_class(*arguments, **keywords)

    def bind_function(
        self, functions: Mapping[str, Callable[..., Any]], node: ast.expr
    ) -> "partial[Any]":
        """Return a partial of the function that a syntax node names, with the options that the node
        sets as its keywords.

        The function is one of `functions`, by its name there, or a user's (`module:Name`). Its
        first parameter is no option: the caller of the partial gives it.

        Raises:
            WakefulError: the function or an option is unknown, an option has another type, or one
                is given without its name.
        """
        call, python_name = self._as_call(node)
        is_external = python_name in self.external  # stands for a `module:Name`
        name = self._unparse(call.func)  # as the user wrote it
        if is_external:
            target = external_object(name, imports=self.imports)
            if not callable(target):
                raise WakefulError(f"{self.title}={name!r} is neither a class nor a function")
        else:
            target = functions.get(name)
        if target is None:
            raise WakefulError(
                f"{self.title}={name!r} is not one of {', '.join(functions)}"
                f"{did_you_mean(name, functions)}"
            )
        if call.args:
            raise WakefulError(f"{name}: name the option that is {self._unparse(call.args[0])}")
        options = list(_options(target).items())[1:]  # the first parameter is the caller's
        keywords = self._evaluate_keywords(call, dict(options))
        if not is_external:  # a user's function may have annotations that cannot be evaluated
            _check_types(name, target, keywords)
        return partial(target, **keywords)

    def _as_call(self, node: ast.expr) -> tuple[ast.Call, str]:
        """Return (call, name): the node as a call, and the name that is called. A bare name counts
        as a call without arguments.

        Raises:
            WakefulError: the node is neither a name nor the call of one.
        """
        if isinstance(node, ast.Name):
            node = ast.Call(func=node, args=[], keywords=[])
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise WakefulError(
                f"in {self.title} {self.expression!r}: {self._unparse(node)!r} is neither a name "
                "nor a call"
            )
        return node, node.func.id

    def _evaluate_keywords(
        self, call: ast.Call, options: Mapping[str, inspect.Parameter]
    ) -> dict[str, Any]:
        """Return the values of a call's named arguments, by name.

        Raises:
            WakefulError: a name is not in `options` or is given twice, or a value is neither plain
                nor a variant.
        """
        name = self._unparse(call.func)
        keywords: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg not in options:  # None if `**` is written
                allowed = (
                    f"its options are {', '.join(options)}" if options else "it has no options"
                )
                raise WakefulError(
                    f"{name} has no option {keyword.arg!r}"
                    f"{did_you_mean(str(keyword.arg), options)}; {allowed}"
                )
            if keyword.arg in keywords:
                raise WakefulError(f"{name}: {keyword.arg} is given twice in {self.expression!r}")
            keywords[keyword.arg] = self._evaluate(keyword.value)
        return keywords

    def _find_class(self, name: str, is_option: bool) -> type[Variant]:
        """Return the class of a variant by its name in the syntax tree, where a Python name may
        stand for a user's `module:Name`.

        `is_option` is True where the name is an option of another variant: other names are
        suggested then.

        Raises:
            WakefulError: the folder has no variant of that name, or a user's class is not one.
        """
        if name in self.external:
            return self._find_external_class(self.external[name])
        classes = variants_by_name(self.folder)
        if name not in classes:
            noun, allowed = _allowed_names(self.folder, is_option)
            raise WakefulError(
                f"unknown {noun} {name!r}{did_you_mean(name, classes)}; there are "
                f"{', '.join(allowed)}"
            )
        return classes[name]

    def _find_external_class(self, name: str) -> type[Variant]:
        """Return a user's class, given as `module:Name`.

        Raises:
            WakefulError: the class does not exist, or is not derived from a base class of the
                folder's variants.
        """
        external = external_object(name, imports=self.imports)
        bases = _base_classes(self.folder)
        if not isinstance(external, type) or not issubclass(external, bases):
            reason = "there is no such class" if external is None else "it is not one"
            raise WakefulError(
                f"{name} must be a subclass of {' or '.join(base.__name__ for base in bases)}, and "
                f"{reason}"
            )
        return external

    def _evaluate(self, node: ast.expr) -> Any:
        """Return the value of an argument: a `range`, a variant, or a literal.

        Raises:
            WakefulError: the argument is something else, or a range that is too large.
        """
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "range":
            return self._evaluate_range(node)
        # A name or a call is another variant, if there is a folder to look it up in.
        if self.folder and isinstance(node, ast.Name | ast.Call):
            return self.build_variant(node, is_option=True)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise WakefulError(
                f"in {self.title} {self.expression!r}: {self._unparse(node)!r} is not a plain value"
            ) from None

    def _evaluate_range(self, call: ast.Call) -> range:
        """Return the range that a call such as `range(2, 8)` writes.

        Raises:
            WakefulError: there are not one to three integers, one is too large, or the step is 0.
        """
        bounds = [self._evaluate(argument) for argument in call.args]
        if not 1 <= len(bounds) <= 3 or not all(type(bound) is int for bound in bounds):
            raise WakefulError(f"range takes one to three integers, not {ast.unparse(call)!r}")
        has_zero_step = bounds[2:] == [0]
        if has_zero_step or any(abs(bound) > _LARGEST for bound in bounds):
            raise WakefulError(
                f"range takes bounds up to {_LARGEST} and no step of 0, not {ast.unparse(call)!r}"
            )
        return range(*bounds)

    def _unparse(self, node: ast.expr) -> str:
        """Return a node's source text, with every `module:Name` as it was written."""
        text = ast.unparse(node)
        for name, original in self.external.items():
            text = text.replace(name, original)
        return text


@cache
def _base_classes(folder: str) -> tuple[type[Variant], ...]:
    """Return the base classes of a folder's variants: public classes without `examples`, from one
    of which a user's own variant is derived.
    """
    return tuple(
        variant_class
        for variant_class in package_classes(folder)
        if issubclass(variant_class, Variant)
        and "examples" not in vars(variant_class)
        and not variant_class.__name__.startswith("_")
    )


def _folder_noun(folder: str) -> str:
    """Return the name of a folder's variants in messages: "scheme" of "quantization.schemes"."""
    return _NOUNS.get(folder, folder.rpartition(".")[2].removesuffix("s"))


def _allowed_names(folder: str, is_option: bool) -> tuple[str, list[str]]:
    """Return (noun, names) for an error message about an unknown name: what was expected there,
    such as "route", and the names that are allowed.

    Most folders have variants of one kind. "quantization.schemes" also has the parts of schemes:
    its main base class is `Scheme`, named as the folder, and `Grid` and `Method` are the bases of
    parts. Parts are allowed only as an option (`is_option`), schemes only where it is none.
    """
    noun, classes, bases = _folder_noun(folder), variants_by_name(folder), _base_classes(folder)
    main_base = next((base for base in bases if base.__name__.lower() == noun), None)
    if main_base is None:
        return noun, list(classes)
    part_bases = tuple(base for base in bases if not issubclass(base, main_base))
    if is_option and part_bases:
        noun_of_parts = " or ".join(base.__name__.lower() for base in part_bases)
        return noun_of_parts, _names_derived_from(part_bases, classes)
    names = _names_derived_from((main_base,), classes)
    if part_bases:  # `scheme` alone is of no use: all its parts are to be given as options
        names = [name for name in names if name != noun]
    return noun, names


def _names_derived_from(
    bases: tuple[type[Variant], ...], classes: Mapping[str, type[Variant]]
) -> list[str]:
    """Return the names of the classes that are derived from one of `bases`."""
    return [name for name, kind in classes.items() if issubclass(kind, bases)]


def _check_types(title: str, target: Callable[..., Any], keywords: dict[str, Any]) -> None:
    """Check that `keywords`, the options given to a class or function (`target`), have the types
    that it annotates and are finite. Where a float is annotated, convert an integer in place.

    Raises:
        WakefulError: a value has another type or is not finite. The message begins with `title`,
            the name of the class or function.
    """
    if not keywords:
        return
    try:
        hints = get_type_hints(target.__init__ if isinstance(target, type) else target)
    except NameError as error:
        raise WakefulError(f"the types of {title}'s options cannot be found: {error}") from None
    for name, value in keywords.items():
        hint = hints.get(name)  # None, without an annotation, fits every value
        if not _fits_type(value, hint):
            expected = hint.__name__ if isinstance(hint, type) else str(hint)
            if get_origin(hint) is Literal:
                expected = " or ".join(map(repr, get_args(hint)))
            raise WakefulError(f"{title}: {name} must be {expected}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise WakefulError(f"{title}: {name} must be finite, got {value}")
        if hint is float:
            keywords[name] = float(value)


def _fits_type(value: Any, hint: Any) -> bool:
    """Return True if a value fits a type hint: a class, a union, a `Literal`, a list or a tuple.
    Every value fits a hint of another form.
    """
    origin, inner = get_origin(hint), get_args(hint)  # of list[int]: list and (int,)
    if origin is Literal:
        return value in inner
    if origin in (Union, types.UnionType):
        return any(_fits_type(value, option) for option in inner)
    if origin is list:
        return type(value) is list and all(_fits_type(item, inner[0]) for item in value)
    if origin is tuple:
        return type(value) is tuple and _fit_items(value, inner)
    return not isinstance(hint, type) or _fits_class(value, hint)


def _fit_items(items: tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    """Return True if the items of a tuple fit the hints inside `tuple[...]`."""
    if hints[-1] is Ellipsis:  # tuple[T, ...]: any number of items of one type
        hints = hints[:1] * len(items)
    return len(items) == len(hints) and all(map(_fits_type, items, hints))


def _fits_class(value: Any, kind: type) -> bool:
    """Return True if a value is of a class; an integer fits float too, a boolean bool alone."""
    if kind is float:
        return type(value) in (int, float)
    return isinstance(value, kind) and (type(value) is not bool or kind is bool)


@cache
def _signature(kind: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(kind)


def _options(kind: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(_signature(kind).parameters)


def _format_value(value: object) -> str:
    return str(value) if isinstance(value, Variant) else repr(value)
