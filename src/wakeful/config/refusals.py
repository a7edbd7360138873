"""Tables of options' ranges, and of those that exclude, need or forbid others, with reasons.

A class of options (`Ruled`) checks its table when it is made. A condition is a dotted name, which
holds where the field is not at its default; `name=value`, also of one of several values; or
`name!=value`.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from wakeful.config.options import default_of, flag_of
from wakeful.errors import WakefulError


@dataclass(frozen=True)
class Rule:
    """A condition on some options, whose names are parted by spaces."""

    one: str

    def check(self, options: Any) -> None:
        """Raise `WakefulError` where the options break it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Within(Rule):
    """Each is a finite number in an interval, such as `(0, 1]` or `[0, 2**63)`."""

    span: str

    def check(self, options: Any) -> None:
        low, high = map(_bound, self.span[1:-1].split(","))
        for name, value in _values(options, self.one):
            above = low <= value if self.span[0] == "[" else low < value
            if not (above and (value <= high if self.span[-1] == "]" else value < high)):
                raise WakefulError(f"{name} must be in {self.span}, got {value}")


@dataclass(frozen=True)
class AtLeast(Rule):
    """None is below a number."""

    least: int

    def check(self, options: Any) -> None:
        for name, value in _values(options, self.one):
            if not value >= self.least:
                allowed = f"be at least {self.least}" if self.least else "not be negative"
                raise WakefulError(f"{name} must {allowed}, got {value}")


@dataclass(frozen=True)
class AtMost(Rule):
    """None is above another, which `why` names in words."""

    other: str
    why: str = ""

    def check(self, options: Any) -> None:
        ((other, most),) = _values(options, self.other)
        for name, value in _values(options, self.one):
            if value > most:
                words = f"{self.why}, " if self.why else ""
                raise WakefulError(f"{name} = {value} is longer than {words}{other} = {most}")


@dataclass(frozen=True)
class Pair(Rule):
    """A relation of the options of `one` to those of `other`, each a list of conditions."""

    other: str
    why: str


class Excludes(Pair):
    """None of one goes with any of the other."""

    def check(self, options: Any) -> None:
        for one in _holding(options, self.one):
            for other in _holding(options, self.other):
                raise WakefulError(f"{one} and {other}: {self.why}; leave out one of the two")


class Needs(Pair):
    """Each of one does something only with some of the other."""

    def check(self, options: Any) -> None:
        for one in _holding(options, self.one):
            if not _holding(options, self.other):
                wanted = " or ".join(map(_flag, self.other.split()))
                raise WakefulError(f"{one} needs {wanted}: {self.why}; give that too")


@dataclass(frozen=True)
class Forbids(Rule):
    """None of one goes with these options at all."""

    why: str

    def check(self, options: Any) -> None:
        for one in _holding(options, self.one):
            raise WakefulError(f"{one}: {self.why}; leave it out")


def check_rules(options: Any, *rules: Rule) -> None:
    """Raise `WakefulError` at the first rule that options break."""
    for rule in rules:
        rule.check(options)


class Ruled:
    """Options that keep to rules."""

    RULES: ClassVar[tuple[Rule, ...]] = ()
    SECTION: ClassVar[str] = ""
    """The part of other options that they are, if any."""

    def __post_init__(self) -> None:
        check_rules(self, *self.RULES)


def forbidden(kind: type) -> frozenset[str]:
    """Return the dotted names of the options that a class has, and its rules forbid."""
    rules = (rule for rule in getattr(kind, "RULES", ()) if isinstance(rule, Forbids))
    return frozenset(name for rule in rules for name in rule.one.split())


def _values(options: Any, names: str) -> list[tuple[str, Any]]:
    place = getattr(options, "SECTION", "")
    place += "." if place else ""
    return [(f"{place}{name}", operator.attrgetter(name)(options)) for name in names.split()]


def _bound(text: str) -> float:
    base, _, power = text.partition("**")
    return float(base) ** int(power or 1)


def _holding(options: Any, conditions: str) -> list[str]:
    """Return the conditions that hold, as the flags that would make them."""
    found: list[str] = []
    for condition in conditions.split():
        name, sign, wanted = _parts(condition)
        value = operator.attrgetter(name)(options)
        if not sign:
            holds = value != _default(type(options), name)
        else:
            values = value if isinstance(value, tuple) else (value,)
            holds = (wanted in map(str, values)) == (sign == "=")
        if holds:
            found.append(_flag(condition if sign == "=" else f"{name}={_written(value)}"))
    return found


def _parts(condition: str) -> tuple[str, str, str]:
    name, sign, value = condition.partition("=")
    return name.removesuffix("!"), f"!{sign}" if name.endswith("!") else sign, value


def _flag(condition: str) -> str:
    name, sign, value = _parts(condition)
    if (sign, value) == ("=", "False"):
        return flag_of(name, negative=True)
    return f"{flag_of(name)} {'not ' * (sign == '!=')}{value}".rstrip()


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value is True else f"{value:g}" if isinstance(value, float) else str(value)


@functools.cache
def _default(kind: type, name: str) -> Any:
    first, _, rest = name.partition(".")
    value = default_of(kind.__dataclass_fields__[first])  # pyright: ignore
    return operator.attrgetter(rest)(value) if rest else value
