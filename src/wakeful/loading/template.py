"""Chat templates, rendered within bounds: a template is a program that came with a model.

Jinja's sandbox keeps it from Python's objects. Here every loop, call, filter and output character
is also charged to one allowance of work; operations that multiply a text are checked beforehand.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_ALLOWANCE = 2**23
"""Characters that a rendering may produce in all; a step counts as `_STEP` of them."""
_STEP = 64
_LARGEST = 2**22
"""Characters of one value."""
_LONGEST_TEMPLATE = 2**18
_PRODUCT = 2**26
"""Characters that an operation may multiply a text to."""
_BITS = 4096
"""Most bits of a whole number."""
_MULTIPLIES = frozenset(
    ("replace", "join", "indent", "center", "format", "format_map", "ljust", "rjust", "zfill",
     "expandtabs", "strftime_now")
)  # fmt: skip
"""Filters and methods whose result may be as long as the product of their arguments."""
_FORMATS = frozenset(("format", "format_map", "strftime_now"))
_WIDE = re.compile(r"\*|\d{4}|\{[^{}]*\{")
"""A width in a format string that has four digits or is taken from a value."""
_OMITTED_FILTERS = frozenset(
    ("batch", "slice", "urlize", "wordwrap", "xmlattr", "pprint", "random")
)
"""Filters that no chat template needs."""


class Template:
    """A chat template, compiled once."""

    def __init__(self, source: str) -> None:
        """Compile a template; raise Jinja's exceptions, or ValueError where it is too long."""
        if len(source) > _LONGEST_TEMPLATE:
            raise ValueError(f"it has {len(source):,} characters; {_LONGEST_TEMPLATE:,} are read")
        self._environment = _Bounded()
        self._template = self._environment.from_string(source)

    def render(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
        """Return the text of a conversation; raise whatever the template raises."""
        size = sum(len(text) for message in messages for text in message.values())
        self._environment.left = _ALLOWANCE + _STEP * size
        return self._template.render(messages=messages, tools=None, documents=None, **kwargs)


class _Bounded(ImmutableSandboxedEnvironment):
    """An environment like that of Transformers, in which work is counted."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        self.left = _ALLOWANCE
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols],
            finalize=self._weighed,
        )  # fmt: skip
        self.concat = self._joined
        own = {"tojson": _to_json, "_steps": self._steps, "_weighed": self._weighed}
        filters = {
            name: function
            for name, function in self.filters.items()
            if name not in _OMITTED_FILTERS
        } | own
        self.filters = {name: self._bounded(name, function) for name, function in filters.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": strftime_now,
            "namespace": _Namespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Counting().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)

    def take(self, work: int) -> None:
        """Charge work to the allowance."""
        self.left -= work
        if self.left < 0:
            raise ValueError("it makes more text, or takes more steps, than any conversation needs")

    def weigh(self, value: object) -> int:
        """Return the approximate size of a value as text, and charge it to the allowance."""
        total, parts, waiting = 0, 0, [value]
        while waiting:
            part = waiting.pop()
            parts += 1
            match part:
                case str() | bytes():
                    total += len(part)
                case list() | tuple() | set():
                    waiting.extend(part)
                case dict():
                    waiting += [*part, *part.values()]
                case _:
                    pass
            if total > _LARGEST or parts + len(waiting) > _LARGEST // _STEP:
                raise ValueError(f"it makes a value of more than {_LARGEST:,} characters")
        self.take(total + _STEP * parts)
        return total + parts

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = self.weigh(left), self.weigh(right)
        match operator, left, right:
            case "*", int(), int():
                _check_bits(left.bit_length() + right.bit_length())
            case "*", int(), _:
                self._check_product(left, sizes[1])
            case "*", _, int():
                self._check_product(right, sizes[0])
            case "**", int(), int():
                _check_bits(left.bit_length() * abs(right))
            case "%", str(), _:
                _check_format(left)
            case _:
                pass
        return self._weighed(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        inner = getattr(__obj, "__wrapped__", __obj)
        of = getattr(inner, "__self__", None)
        arguments = (of, *args) if isinstance(of, str) else args
        __self._check(getattr(inner, "__name__", ""), arguments, kwargs)
        return __self._weighed(super().call(__context, __obj, *args, **kwargs))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._check(name, args, kwargs)
            return self._weighed(function(*args, **kwargs))

        return bounded

    def _check(self, name: str, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
        """Raise ValueError where a function's result would be too large."""
        arguments = [*args, *kwargs.values()]
        sizes = [self.weigh(value) for value in arguments]
        if name in _FORMATS:
            for value in arguments:
                _check_format(value)
        if name in _MULTIPLIES:
            numbers = [abs(value) for value in arguments if isinstance(value, int)]
            self._check_product(*numbers, *sizes)

    def _check_product(self, *factors: int) -> None:
        if math.prod(1 + factor for factor in factors) > _PRODUCT:
            raise ValueError("it makes a text many times as long as what it is given")

    def _weighed(self, value: Any) -> Any:
        self.weigh(value)
        return value

    def _steps(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.take(_STEP)
            yield item

    def _joined(self, parts: Iterable[str]) -> str:
        joined: list[str] = []
        for part in parts:
            self.take(len(part) + 1)
            joined.append(part)
        return "".join(joined)


class _Counting(NodeTransformer):
    """Transformer that passes loops, slices and joined texts through filters that count."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through("_steps", cast(nodes.Expr, node.iter))
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through("_weighed", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        text, *parts = (_through("string", part) for part in node.nodes)
        for operand in parts:
            text = nodes.Add(text, operand, lineno=node.lineno)
        return text


def _through(name: str, node: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Namespace(jinja2.utils.Namespace):
    """Values that a template sets; no name begins with an underscore, as Transformers asks."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # pyright: ignore
        self, *rest = args
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")
        super().__setitem__(name, value)


class _Generation(Extension):
    """`{% generation %}`, which marks what a model writes: here its content alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _check_format(text: object) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise ValueError("it formats a text in a width that is not its own")


def _check_bits(bits: int) -> None:
    if bits > _BITS:
        raise ValueError("it makes a number of more than a thousand digits")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(
        value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys,
        indent=None if indent is None else min(indent, 16),
    )  # fmt: skip
