"""Options that do not go together."""

import operator
import re
from dataclasses import dataclass, field

import pytest

from wakeful.config.rules import (
    AtLeast,
    Excludes,
    Forbids,
    Needs,
    Rule,
    Within,
    check_rules,
    forbidden_options,
)
from wakeful.config.schema import Config
from wakeful.curing.options import CureOptions
from wakeful.diagnosis.options import DiagnoseOptions
from wakeful.errors import WakefulError
from wakeful.evaluation.options import EvaluateOptions
from wakeful.inheritance.options import InheritOptions
from wakeful.quantization.options import QuantizeOptions

TABLES = (
    Config, CureOptions, DiagnoseOptions, EvaluateOptions, InheritOptions, QuantizeOptions,
)  # fmt: skip


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
        (Excludes("a", "names", "why"), Options(a=0.25, names=("y", "x")),
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


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (Within("a part.n", "(0, 2**2]"), Options(part=Part(n=5)),
         "part.n must be in (0, 2**2], got 5"),
        (Within("a", "[0.5, inf)"), Options(a=float("nan")), "a must be in [0.5, inf), got nan"),
        (Within("a", "[0, inf)"), Options(a=float("inf")), "a must be in [0, inf), got inf"),
        (AtLeast("part.n", 1), Options(part=Part()), "part.n must be at least 1, got 0"),
        (AtLeast("part.n", 0), Options(part=Part(n=-1)), "part.n must not be negative, got -1"),
        (Excludes("b=False", "a", "why"), Options(a=2.0), "--no_b and --a 2: why; leave out one"),
    ],
)  # fmt: skip
def test_a_range_says_what_is_outside(rule: Rule, options: Options, message: str) -> None:
    with pytest.raises(WakefulError, match=f"^{re.escape(message)}"):
        check_rules(options, rule)


@pytest.mark.parametrize("kind", TABLES)
def test_tables_name_the_options_of_their_class(kind: type) -> None:
    given = {"sinks": True} if kind is CureOptions else {}
    made = kind(**given)
    for rule in kind.RULES:  # pyright: ignore[reportAttributeAccessIssue]
        rule.check(made)  # every name on the left is read
        others = getattr(rule, "counterparts", getattr(rule, "limit", ""))
        for condition in f"{rule.conditions} {others}".split():
            operator.attrgetter(re.split(r"!?=", condition)[0])(made)


def test_what_is_always_refused_is_known() -> None:
    assert "data.first_batch" in forbidden_options(InheritOptions)
    assert not forbidden_options(Config)
