"""The checker behind every annotation of the library, in tests only."""

import ast
import dataclasses
import inspect
from functools import cache, wraps
from types import FunctionType, SimpleNamespace
from typing import Any, get_type_hints

import jaxtyping
import numpy as np
from beartype import BeartypeConf, FrozenDict, beartype
from jaxtyping import _import_hook as hook
from jaxtyping._storage import pop_shape_memo, push_shape_memo

# An int where a float is asked for, and numpy's integers where an int is, are what they stand for.
types_of = beartype(
    conf=BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict({int: int | np.integer}))
)


def checked(kind: Any) -> Any:
    """Check a function's arguments and its result, a letter meaning one length in all their shapes.

    `jaxtyping.jaxtyped` does so too, but binds the arguments by name and checks them twice, which
    took half of the time of all tests.
    """
    if inspect.isclass(kind):
        if dataclasses.is_dataclass(kind):
            kind.__init__ = checked(kind.__init__)
        return kind
    if not kind.__annotations__:
        return kind

    @cache  # made at the first call, when every name that annotations use is there
    def function() -> Any:
        return types_of(resolved(kind))

    @wraps(kind)
    def with_shapes(*args: Any, **kwargs: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:
            return kind(*args, **kwargs)
        push_shape_memo({})
        try:
            return function()(*args, **kwargs)
        finally:
            pop_shape_memo()

    return with_shapes


def resolved(function: FunctionType) -> FunctionType:
    """Return the function with every name in its annotations looked up.

    What only a static checker imports may be anything.
    """
    other = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    other.__kwdefaults__, other.__module__ = function.__kwdefaults__, function.__module__
    other.__qualname__ = function.__qualname__
    for name, annotation in function.__annotations__.items():
        holder = SimpleNamespace(__annotations__={name: annotation})
        try:
            hints = get_type_hints(holder, function.__globals__, include_extras=True)
        except (NameError, AttributeError):
            hints = {name: Any}
        other.__annotations__ |= hints
    return other


def decorator(self: hook.Typechecker) -> ast.expr:
    """Return what the import hook puts on every function: the checker itself."""
    return ast.parse(f"jaxtyping._import_hook.Typechecker.lookup['{self.hash}']", mode="eval").body
