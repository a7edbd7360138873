"""Rules of options: ranges, and options that exclude, need or forbid others, with reasons.

A class of options (`RuleChecked`) checks its rules when an instance is created. A condition is a
dotted name, which holds if the field is not at its default, or `name=value`, which holds if the
field has that value, or it among several.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from wakeful.config.options import field_default, flag_name
from wakeful.errors import WakefulError


@dataclass(frozen=True)
class Rule:
    """A rule about the options that `conditions` lists, separated by spaces."""

    conditions: str

    def check(self, options: Any) -> None:
        """Raise `WakefulError` if the options break the rule."""
        raise NotImplementedError


@dataclass(frozen=True)
class Within(Rule):
    """Finite numbers in an interval, such as `(0, 1]` or `[0, 2**63)`."""

    interval: str

    def check(self, options: Any) -> None:
        """Raise `WakefulError` if a field that this rule names is outside the interval, or is NaN.

        The interval is text such as "(0, 1]": "[" and "]" include a bound, "(" and ")" do not. The
        fields' names are in `conditions`.
        """
        low, high = map(_parse_bound, self.interval[1:-1].split(","))
        for name, value in _named_values(options, self.conditions):
            above_low = low <= value if self.interval[0] == "[" else low < value
            below_high = value <= high if self.interval[-1] == "]" else value < high
            if not (above_low and below_high):
                raise WakefulError(f"{name} must be in {self.interval}, got {value}")


@dataclass(frozen=True)
class AtLeast(Rule):
    """Numbers not below a minimum."""

    minimum: int

    def check(self, options: Any) -> None:
        """Raise `WakefulError` if a field that this rule names, in `conditions`, is below the
        minimum or NaN.
        """
        for name, value in _named_values(options, self.conditions):
            if not value >= self.minimum:  # true of NaN too, unlike `value < self.minimum`
                allowed = f"be at least {self.minimum}" if self.minimum else "not be negative"
                raise WakefulError(f"{name} must {allowed}, got {value}")


@dataclass(frozen=True)
class Pair(Rule):
    """A rule about `conditions` and `counterparts`, both lists of conditions."""

    counterparts: str
    why: str


class Excludes(Pair):
    """No condition holds together with any of the counterparts."""

    def check(self, options: Any) -> None:
        """Raise `WakefulError` at the first condition that holds together with a counterpart."""
        for condition in _flags_that_hold(options, self.conditions):
            for excluded in _flags_that_hold(options, self.counterparts):
                raise WakefulError(
                    f"{condition} and {excluded}: {self.why}; leave out one of the two"
                )


class Needs(Pair):
    """Every condition needs at least one of the counterparts."""

    def check(self, options: Any) -> None:
        """Raise `WakefulError` if a condition holds and none of the counterparts does."""
        for condition in _flags_that_hold(options, self.conditions):
            if not _flags_that_hold(options, self.counterparts):
                needed = " or ".join(map(_condition_flag, self.counterparts.split()))
                raise WakefulError(f"{condition} needs {needed}: {self.why}; give that too")


@dataclass(frozen=True)
class Forbids(Rule):
    """No condition may hold."""

    why: str

    def check(self, options: Any) -> None:
        """Raise `WakefulError` if a condition holds."""
        for condition in _flags_that_hold(options, self.conditions):
            raise WakefulError(f"{condition}: {self.why}; leave it out")


def check_rules(options: Any, *rules: Rule) -> None:
    """Raise `WakefulError` for the first rule that options break."""
    for rule in rules:
        rule.check(options)


class RuleChecked:
    """Options that check their rules."""

    RULES: ClassVar[tuple[Rule, ...]] = ()
    SECTION: ClassVar[str] = ""
    """Name of the field that holds these options in other options; "" for none."""

    def __post_init__(self) -> None:
        check_rules(self, *self.RULES)


def forbidden_options(options_class: type) -> frozenset[str]:
    """Return the dotted names of the options that an options class forbids by its rules."""
    rules = (rule for rule in getattr(options_class, "RULES", ()) if isinstance(rule, Forbids))
    return frozenset(name for rule in rules for name in rule.conditions.split())


def _named_values(options: Any, names: str) -> list[tuple[str, Any]]:
    """Return (full name, value) for each dotted name in `names`, which spaces separate.

    A full name begins with the section that holds the options, if any: "train.steps".
    """
    section = getattr(options, "SECTION", "")
    prefix = f"{section}." if section else ""
    return [(f"{prefix}{name}", operator.attrgetter(name)(options)) for name in names.split()]


def _parse_bound(text: str) -> float:
    """Return the number in a text such as "0.5", "inf" or "2**63"."""
    base, _, power = text.partition("**")
    return float(base) ** int(power or 1)


def _flags_that_hold(options: Any, conditions: str) -> list[str]:
    """Return the flags, as a user would type them, of those conditions that hold for options.

    `conditions` are separated by spaces. A condition "train.compile" holds if that option is not at
    its default, and "name=value" if the option has this value, or an element of its tuple does.
    """
    flags: list[str] = []
    for condition in conditions.split():
        name, equals_sign, expected = condition.partition("=")
        value = operator.attrgetter(name)(options)
        if equals_sign:
            values = value if isinstance(value, tuple) else (value,)
            if expected in map(str, values):
                flags.append(_condition_flag(condition))
        elif value != _default_value(type(options), name):
            flags.append(_condition_flag(f"{name}={_format_value(value)}"))
    return flags


def _condition_flag(condition: str) -> str:
    """Return a condition as a user would type it: "--tune 3" for "tune=3", "--no_bos" for
    "bos=False".
    """
    name, _, value = condition.partition("=")
    if value == "False":
        return flag_name(name, negative=True)
    return f"{flag_name(name)} {value}".rstrip()


def _format_value(value: Any) -> str:
    """Return an option's value as it is typed after a flag; empty for a switch that is on."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if value is True:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


@functools.cache
def _default_value(options_class: type, name: str) -> Any:
    """Return the default value of a class's option by its dotted name, such as "steps", or
    "train.steps" for a class with a field `train`.
    """
    first, _, rest = name.partition(".")
    value = field_default(options_class.__dataclass_fields__[first])  # pyright: ignore
    return operator.attrgetter(rest)(value) if rest else value
