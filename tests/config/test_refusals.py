"""Options that do not go together."""

import dataclasses
import re
from dataclasses import dataclass, field

import pytest

from wakeful.config.refusals import Excludes, Forbids, Needs, Rule, check_rules
from wakeful.config.verbs import inherit
from wakeful.errors import WakefulError


@dataclass(frozen=True, kw_only=True)
class Part:
    n: int = 0


@dataclass(frozen=True, kw_only=True)
class Options:
    a: float = 0.5
    b: bool = False
    names: tuple[str, ...] = ()
    part: Part = field(default_factory=lambda: Part(n=3))


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (Excludes("a", "b", "why"), Options(a=2.0, b=True),
         "--a 2 and --b: why; leave out one of the two"),
        (Excludes("a", "part.n b", "why"), Options(a=2.0, part=Part(n=4)),
         "--a 2 and --part.n 4: why; leave out one of the two"),
        (Excludes("names=x", "part.n", "why"), Options(names=("y", "x"), part=Part()),
         "--names x and --part.n 0: why; leave out one of the two"),
        (Needs("part.n", "b names=x", "why"), Options(part=Part(n=4)),
         "--part.n 4 needs --b or --names x: why; give that too"),
        (Forbids("a part.n", why="why"), Options(part=Part(n=4)),
         "--part.n 4: why; leave it out"),
        (Excludes("a!=0.5", "names", "why"), Options(a=0.25, names=("y", "x")),
         "--a 0.25 and --names y x: why; leave out one of the two"),
    ],
)  # fmt: skip
def test_a_rule_says_which_options_break_it(rule: Rule, options: Options, message: str) -> None:
    check_rules(Options(), rule)
    with pytest.raises(WakefulError, match=f"^{re.escape(message)}$"):
        check_rules(options, rule)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (Excludes("a", "b", "why"), Options(a=2.0)),
        (Excludes("a", "b", "why"), Options(b=True)),
        (Needs("part.n", "b names=x", "why"), Options(part=Part(n=4), names=("x",))),
        (Excludes("names=x", "b", "why"), Options(names=("xy",), b=True)),
    ],
)
def test_a_rule_lets_the_rest_be(rule: Rule, options: Options) -> None:
    check_rules(options, rule)


@pytest.mark.parametrize("rule", inherit._RULES, ids=lambda rule: rule.one[:20])
def test_the_rules_of_an_inheritance_name_its_options(rule: Rule) -> None:
    assert rule.why
    assert dataclasses.astuple(rule)[0]
    rule.check(inherit.InheritOptions())  # every name is read
    for condition in f"{rule.one} {rule.other}".split():
        place = inherit.InheritOptions()
        for part in re.split(r"!?=", condition)[0].split("."):
            place = getattr(place, part)
