"""Means, standard errors and their quantiles against hand calculations."""

import math

import numpy as np
import pytest

from wakeful.estimates import (
    mean_and_error,
    ratio_and_error,
    running_mean,
    student_quantile,
    with_error,
)


def test_mean_and_error() -> None:
    assert mean_and_error([1.0, 2.0, 6.0]) == pytest.approx((3.0, math.sqrt(7.0) / math.sqrt(3)))
    mean, error = mean_and_error([4.0])
    assert mean == 4.0
    assert math.isnan(error)
    assert mean_and_error([3.735836] * 3) == (3.735836, 0.0)


def test_ratio_of_equal_clusters_is_the_mean() -> None:
    values = np.array([1.0, 2.0, 6.0])
    assert ratio_and_error(values * 5, [5, 5, 5]) == pytest.approx(mean_and_error(values))


def test_ratio_weighs_clusters_by_their_counts() -> None:
    ratio, error = ratio_and_error([2.0, 30.0], [1, 9])
    assert ratio == pytest.approx(3.2)
    # Residuals 2 − 3.2 and 30 − 28.8, twice their squares, over the 10 counted.
    assert error == pytest.approx(math.sqrt(2 * (1.44 + 1.44)) / 10)


def test_ratio_error_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        counts = generator.integers(20, 60, 50)
        totals = counts * generator.normal(3.0, 0.5, 50)
        ratio, error = ratio_and_error(totals, counts)
        inside += abs(ratio - 3.0) < student_quantile(49) * error
    assert 0.91 < inside / 400 < 0.98


def test_running_mean_looks_back() -> None:
    assert running_mean([1.0, 2.0, 3.0, 10.0], 2).tolist() == [1.0, 1.5, 2.5, 6.5]
    assert running_mean([1.0, 2.0], 100).tolist() == [1.0, 1.5]


@pytest.mark.parametrize(
    ("freedom", "value"),
    [(1, 12.706), (2, 4.303), (10, 2.228), (11, 2.201), (30, 2.042), (600, 1.964)],
)
def test_student_quantile(freedom: int, value: float) -> None:
    assert student_quantile(freedom) == pytest.approx(value, abs=1.5e-3)
    assert student_quantile(0) == math.inf


def test_with_error_shows_two_digits_of_small_errors() -> None:
    assert with_error(1.23456, 0.0123) == "1.2346 ± 0.0123"
    assert with_error(-0.5, 0.000012, "+") == "-0.500000 ± 0.000012"
    assert with_error(2.0, math.nan) == "2.0000"
