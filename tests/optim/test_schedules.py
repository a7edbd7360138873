"""The learning rate over a run."""

import math

import pytest

from wakeful.optim.schedules import warmup_cosine

PAPER = {"steps": 10_000, "warmup_steps": 120, "initial": 1e-7, "peak": 6e-4, "final": 6e-5}


def test_the_schedule_of_value_residual_learning() -> None:
    assert warmup_cosine(0, **PAPER) == pytest.approx(1e-7)
    assert warmup_cosine(60, **PAPER) == pytest.approx((1e-7 + 6e-4) / 2)
    assert warmup_cosine(120, **PAPER) == pytest.approx(6e-4)
    assert warmup_cosine(9_999, **PAPER) == pytest.approx(6e-5)
    middle = 120 + (9_999 - 120) // 2
    assert warmup_cosine(middle, **PAPER) == pytest.approx(3.3e-4, rel=1e-3)
    quarter = 120 + (9_999 - 120) / 4
    expected = 6e-5 + 5.4e-4 * 0.5 * (1 + math.cos(math.pi / 4))
    assert warmup_cosine(round(quarter), **PAPER) == pytest.approx(expected, rel=1e-3)


def test_a_run_may_have_no_warmup_or_nothing_else() -> None:
    one = {"steps": 1, "initial": 0.0, "peak": 1.0, "final": 0.1}
    assert warmup_cosine(0, warmup_steps=0, **one) == 1.0
    assert warmup_cosine(0, warmup_steps=1, **one) == 0.0
