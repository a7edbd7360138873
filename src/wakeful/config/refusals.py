"""Options that do not go together, as tables: what excludes, needs or forbids which, and why.

A condition is a dotted name, which holds where the field is not at its default; `name=value`, also
of one of several values; or `name!=value`.
"""

import dataclasses
import functools
import operator
import re
from dataclasses import dataclass
from typing import Any

from wakeful.errors import WakefulError

_CONDITION = re.compile(r"([\w.]+)(?:(!?=)(.*))?")


@dataclass(frozen=True)
class Rule:
    """What options of `one` do to those of `other`, each a list of conditions parted by spaces."""

    one: str
    other: str
    why: str

    def check(self, options: Any) -> None:
        """Raise `WakefulError` where the options break it."""
        raise NotImplementedError


class Excludes(Rule):
    """None of one goes with any of the other."""

    def check(self, options: Any) -> None:
        for one in _holding(options, self.one):
            for other in _holding(options, self.other):
                raise WakefulError(f"{one} and {other}: {self.why}; leave out one of the two")


class Needs(Rule):
    """Each of one does something only with some of the other."""

    def check(self, options: Any) -> None:
        for one in _holding(options, self.one):
            if not _holding(options, self.other):
                wanted = " or ".join(map(_flag, self.other.split()))
                raise WakefulError(f"{one} needs {wanted}: {self.why}; give that too")


@dataclass(frozen=True)
class Forbids(Rule):
    """None of one goes with these options at all."""

    other: str = ""
    why: str = dataclasses.field(kw_only=True)

    def check(self, options: Any) -> None:
        for one in _holding(options, self.one):
            raise WakefulError(f"{one}: {self.why}; leave it out")


def check_rules(options: Any, *rules: Rule) -> None:
    """Raise `WakefulError` at the first rule that a verb's options break."""
    for rule in rules:
        rule.check(options)


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
    found = _CONDITION.fullmatch(condition)
    assert found is not None, condition
    return found[1], found[2] or "", found[3] or ""


def _flag(condition: str) -> str:
    name, sign, value = _parts(condition)
    return f"--{name} {'not ' * (sign == '!=')}{value}".rstrip()


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value is True else f"{value:g}" if isinstance(value, float) else str(value)


@functools.cache
def _default(kind: type, name: str) -> Any:
    first, _, rest = name.partition(".")
    entry = next(each for each in dataclasses.fields(kind) if each.name == first)  # pyright: ignore
    made = entry.default_factory
    value = entry.default if made is dataclasses.MISSING else made()
    return operator.attrgetter(rest)(value) if rest else value
