"""The learning rate over a run."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@st.composite
def schedules(draw: st.DrawFn) -> dict:
    steps = draw(st.integers(1, 500))
    peak = draw(st.floats(1e-6, 1.0))
    return {
        "steps": steps,
        "warmup_steps": draw(st.integers(0, steps)),
        "initial": draw(st.floats(0.0, peak)),
        "peak": peak,
        "final": draw(st.floats(0.0, peak)),
    }


@given(schedules())
def test_the_rate_rises_to_the_peak_and_falls_to_the_floor(schedule: dict) -> None:
    rates = [warmup_cosine(step, **schedule) for step in range(schedule["steps"])]
    rising, falling = rates[: schedule["warmup_steps"]], rates[schedule["warmup_steps"] :]
    tiny = 1e-12 * schedule["peak"]
    assert all(a <= b + tiny for a, b in itertools.pairwise(rising))
    assert all(a >= b - tiny for a, b in itertools.pairwise(falling))
    if rising:
        assert rising[0] == pytest.approx(schedule["initial"])
        # Each step of a straight line is as long as the next.
        rise = (schedule["peak"] - schedule["initial"]) / schedule["warmup_steps"]
        assert all(b - a == pytest.approx(rise, abs=1e-9) for a, b in itertools.pairwise(rising))
    if falling:
        assert falling[0] == pytest.approx(schedule["peak"])
    if len(falling) > 1:
        assert falling[-1] == pytest.approx(schedule["final"], abs=tiny)
        # A cosine is at half height half way down, and symmetric about it.
        ends = schedule["peak"] + schedule["final"]
        assert all(
            a + b == pytest.approx(ends, abs=1e-9)
            for a, b in zip(falling, reversed(falling), strict=True)
        )


def test_past_its_end_a_run_stays_at_the_floor() -> None:
    assert warmup_cosine(20_000, **PAPER) == pytest.approx(6e-5)
