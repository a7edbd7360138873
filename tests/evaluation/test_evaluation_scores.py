"""Figures, their standard errors and paired differences."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wakeful.estimates import mean_and_error, ratio_and_error
from wakeful.evaluation.report import evaluation_summary, score_headlines
from wakeful.scores import Score, paired_difference, score_ratio, scores_table


def score(values: list[float], weights: list[float] | None = None, **over: object) -> Score:
    array = np.array(values, dtype=np.float64)
    fields: dict = {
        "model": "m", "task": "t", "metric": "x", "values": array,
        "keys": tuple(map(str, range(len(values)))),
        "weights": np.ones(len(values)) if weights is None else np.array(weights, np.float64),
    }  # fmt: skip
    return Score(**(fields | over))


numbers = st.lists(st.floats(-5, 5), min_size=2, max_size=30)


@given(numbers, st.data())
def test_a_ratio_has_the_error_of_the_ratio_estimator(values: list[float], data) -> None:
    weights = data.draw(
        st.lists(st.floats(0.5, 9), min_size=len(values), max_size=len(values)), label="weights"
    )
    found = score(values, weights)
    assert (found.figure, found.error) == pytest.approx(ratio_and_error(values, weights), abs=1e-12)
    plain = score(values)
    assert (plain.figure, plain.error) == pytest.approx(mean_and_error(values), abs=1e-12)


def test_a_perplexity_has_the_error_of_the_delta_method() -> None:
    values, weights = [9.0, 12.0, 7.5], [4.0, 5.0, 3.0]
    ratio, error = ratio_and_error(values, weights)
    found = score(values, weights, exponential=True)
    assert found.figure == pytest.approx(math.exp(ratio))
    assert found.error == pytest.approx(math.exp(ratio) * error)


def test_a_paired_difference_is_that_of_the_differences() -> None:
    ours, theirs = [1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0, 0.0]
    paired = paired_difference(score(ours), score(theirs))
    assert paired == pytest.approx(mean_and_error(np.subtract(ours, theirs)))
    unpaired = math.hypot(score(ours).error, score(theirs).error)
    assert paired is not None
    assert paired[1] < unpaired
    assert paired_difference(score(ours), score(ours)) == (0.0, 0.0)


def test_a_ratio_of_two_speeds_has_the_error_of_both() -> None:
    ours, theirs = (score([32.0] * 3, seconds) for seconds in ([1.0, 1.1, 1.2], [2.0, 2.3, 2.1]))
    times, error = score_ratio(ours, theirs)
    assert times == pytest.approx((96 / 3.3) / (96 / 6.4))
    # The delta method on ln r: the logarithms of two independent figures are subtracted.
    logs = [each.error / each.figure for each in (ours, theirs)]
    assert error == pytest.approx(times * math.sqrt(logs[0] ** 2 + logs[1] ** 2))
    assert math.isnan(score_ratio(score([2.0]), score([1.0]))[1])


def test_other_examples_are_not_paired() -> None:
    assert paired_difference(score([1.0, 2.0]), score([1.0, 2.0], keys=("a", "b"))) is None


def test_one_example_and_an_overflow_have_no_error() -> None:
    assert math.isnan(score([1.0]).error)
    endless = score([8000.0, 9000.0], [10.0, 10.0], exponential=True)
    assert endless.figure == math.inf
    assert math.isnan(endless.error)


def test_rows_are_tidy() -> None:
    frame = scores_table([score([1.0, 2.0]), score([3.0], model="n")])
    assert frame.columns == ["model", "task", "metric", "example", "key", "value", "weight"]
    assert frame["value"].to_list() == [1.0, 2.0, 3.0]
    assert frame["model"].to_list() == ["m", "m", "n"]


def test_losses_are_compared_once_in_nats_whatever_their_unit() -> None:
    """e^loss of a bad model has an error that hides what is plain in nats; the interval is e to the
    loss's own, and never below zero.
    """
    rng = np.random.default_rng(0)
    counts, keys = np.full(6, 50.0), tuple("abcdef")

    def scores(name: str, loss: float) -> list[Score]:
        nats = counts * (loss + rng.normal(0, 0.6, 6))
        shared = {"model": name, "task": "text", "keys": keys, "values": nats}
        return [
            Score(metric="perplexity", weights=counts, exponential=True, higher_is_better=False,
                  **shared),
            Score(metric="bits per byte", weights=counts * 3 * math.log(2), higher_is_better=False,
                  **shared),
        ]  # fmt: skip

    good, bad = scores("good", 4.1), scores("bad", 12.5)
    (said,) = score_headlines([*good, *bad])
    assert said == "Against good, bad is worse in text: perplexity and text: bits per byte."
    gap, error = paired_difference(bad[0], good[0])
    assert (gap, error) == pytest.approx(mean_and_error((bad[0].values - good[0].values) / counts))
    loss, spread = mean_and_error(bad[0].values / counts)
    low, high = bad[0].interval
    assert (math.log(low), math.log(high)) == pytest.approx(
        (loss - 2.571 * spread, loss + 2.571 * spread)
    )
    found = evaluation_summary({"good": "x", "bad": "x"}, [*good, *bad], {})
    first = found["differences"][0]
    assert (first["unit"], first["difference"]) == ("nats per token", pytest.approx(gap))
    assert first["low"] == pytest.approx(gap - 2.571 * error)
