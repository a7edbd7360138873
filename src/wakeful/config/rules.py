"""Rules of options: ranges, and options that exclude, need or forbid others, with reasons.

A class of options (`RuleChecked`) checks its rules when an instance is created. A condition is a
dotted name, which holds where the field is not at its default; `name=value`, also where the field
has several values and this is one of them; or `name!=value`.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from wakeful.config.options import default_of, flag_of
from wakeful.errors import WakefulError


@dataclass(frozen=True)
class Rule:
    """A rule about the options that `conditions` lists, separated by spaces."""

    conditions: str

    def check(self, options: Any) -> None:
        """Raise `WakefulError` where the options break it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Within(Rule):
    """Finite numbers in an interval, such as `(0, 1]` or `[0, 2**63)`."""

    span: str

    def check(self, options: Any) -> None:
        low, high = map(_bound, self.span[1:-1].split(","))
        for name, value in _values(options, self.conditions):
            above = low <= value if self.span[0] == "[" else low < value
            if not (above and (value <= high if self.span[-1] == "]" else value < high)):
                raise WakefulError(f"{name} must be in {self.span}, got {value}")


@dataclass(frozen=True)
class AtLeast(Rule):
    """Numbers not below a minimum."""

    minimum: int

    def check(self, options: Any) -> None:
        for name, value in _values(options, self.conditions):
            if not value >= self.minimum:
                allowed = f"be at least {self.minimum}" if self.minimum else "not be negative"
                raise WakefulError(f"{name} must {allowed}, got {value}")


@dataclass(frozen=True)
class AtMost(Rule):
    """Numbers not above the option `limit`, which `why` names in words."""

    limit: str
    why: str = ""

    def check(self, options: Any) -> None:
        ((limit_name, limit),) = _values(options, self.limit)
        for name, value in _values(options, self.conditions):
            if value > limit:
                reason = f"{self.why}, " if self.why else ""
                raise WakefulError(
                    f"{name} = {value} is longer than {reason}{limit_name} = {limit}"
                )


@dataclass(frozen=True)
class Pair(Rule):
    """A rule about `conditions` and `counterparts`, both lists of conditions."""

    counterparts: str
    why: str


class Excludes(Pair):
    """No condition holds together with any of the counterparts."""

    def check(self, options: Any) -> None:
        for condition in _holding(options, self.conditions):
            for excluded in _holding(options, self.counterparts):
                raise WakefulError(
                    f"{condition} and {excluded}: {self.why}; leave out one of the two"
                )


class Needs(Pair):
    """Every condition needs at least one of the counterparts."""

    def check(self, options: Any) -> None:
        for condition in _holding(options, self.conditions):
            if not _holding(options, self.counterparts):
                needed = " or ".join(map(_flag, self.counterparts.split()))
                raise WakefulError(f"{condition} needs {needed}: {self.why}; give that too")


@dataclass(frozen=True)
class Forbids(Rule):
    """No condition may hold."""

    why: str

    def check(self, options: Any) -> None:
        for condition in _holding(options, self.conditions):
            raise WakefulError(f"{condition}: {self.why}; leave it out")


def check_rules(options: Any, *rules: Rule) -> None:
    """Raise `WakefulError` at the first rule that options break."""
    for rule in rules:
        rule.check(options)


class RuleChecked:
    """Options that check their rules."""

    RULES: ClassVar[tuple[Rule, ...]] = ()
    SECTION: ClassVar[str] = ""
    """Name of the part of other options that these are; "" for none."""

    def __post_init__(self) -> None:
        check_rules(self, *self.RULES)


def forbidden_options(kind: type) -> frozenset[str]:
    """Return the dotted names of the options of a class that its rules forbid."""
    rules = (rule for rule in getattr(kind, "RULES", ()) if isinstance(rule, Forbids))
    return frozenset(name for rule in rules for name in rule.conditions.split())


def _values(options: Any, names: str) -> list[tuple[str, Any]]:
    section = getattr(options, "SECTION", "")
    section += "." if section else ""
    return [(f"{section}{name}", operator.attrgetter(name)(options)) for name in names.split()]


def _bound(text: str) -> float:
    base, _, power = text.partition("**")
    return float(base) ** int(power or 1)


def _holding(options: Any, conditions: str) -> list[str]:
    """Return the conditions that hold, as the flags that set them."""
    held: list[str] = []
    for condition in conditions.split():
        name, sign, expected = _parts(condition)
        value = operator.attrgetter(name)(options)
        if not sign:
            holds = value != _default(type(options), name)
        else:
            values = value if isinstance(value, tuple) else (value,)
            holds = (expected in map(str, values)) == (sign == "=")
        if holds:
            held.append(_flag(condition if sign == "=" else f"{name}={_format_value(value)}"))
    return held


def _parts(condition: str) -> tuple[str, str, str]:
    name, sign, value = condition.partition("=")
    return name.removesuffix("!"), f"!{sign}" if name.endswith("!") else sign, value


def _flag(condition: str) -> str:
    name, sign, value = _parts(condition)
    if (sign, value) == ("=", "False"):
        return flag_of(name, negative=True)
    return f"{flag_of(name)} {'not ' * (sign == '!=')}{value}".rstrip()


def _format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value is True else f"{value:g}" if isinstance(value, float) else str(value)


@functools.cache
def _default(kind: type, name: str) -> Any:
    first, _, rest = name.partition(".")
    value = default_of(kind.__dataclass_fields__[first])  # pyright: ignore
    return operator.attrgetter(rest)(value) if rest else value
