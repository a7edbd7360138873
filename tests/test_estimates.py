"""Means, standard errors and their quantiles against hand calculations."""

import math

import numpy as np
import pytest

from wakeful.estimates import (
    Figure,
    error_of_mean,
    finite_or_none,
    format_estimate,
    interval_half_width,
    mean_and_error,
    mean_paired_difference,
    perplexity,
    ratio_and_error,
    round_to_error,
    student_quantile,
    weighted_mean,
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


def test_a_perplexity_moves_with_its_loss() -> None:
    nll, counts = np.array([2.0, 30.0]), np.array([1, 9])
    loss, error = ratio_and_error(nll, counts)
    value, spread = Figure(nll, counts, exponential=True).estimate
    assert (value, spread) == pytest.approx((math.exp(loss), math.exp(loss) * error))
    assert perplexity(1e4) == math.inf
    assert all(map(math.isnan, (perplexity(math.nan), Figure(nll[:1], counts[:1]).estimate[1])))
    assert finite_or_none(value) == value
    assert finite_or_none(math.nan) is finite_or_none(math.inf) is None


def test_paired_differences_by_hand() -> None:
    # Losses 2 and 4 nats on windows of 1 and 3 tokens, less 1 and 2: gaps 1 and 2, mean 7 / 4.
    difference, error = mean_paired_difference([2.0, 4.0], [1.0, 2.0], [1, 3])
    assert difference == pytest.approx(7 / 4)
    assert error == pytest.approx(math.sqrt(2 * ((1 - 7 / 4) ** 2 + (3 * (2 - 7 / 4)) ** 2)) / 4)
    ours, theirs = weighted_mean([2.0, 4.0], [1, 3]), weighted_mean([1.0, 2.0], [1, 3])
    assert ours[0] - theirs[0] == pytest.approx(difference)
    # Under two tokenizers the same text counts differently: u_i / Σ counts of each.
    one = Figure(np.array([2.0, 12.0]), np.array([1, 3]))
    other = Figure(np.array([3.0, 4.0]), np.array([3, 4]))
    gaps = (np.array([2 - 3.5, 12 - 10.5]) / 4) - (np.array([3 - 3, 4 - 4]) / 7)
    assert one.minus(other) == pytest.approx((3.5 - 1.0, math.sqrt(2 * (gaps**2).sum())))
    assert one.minus(one) == (0.0, 0.0)


def test_error_of_a_mean_from_its_squares() -> None:
    assert error_of_mean(14.0, 3) == pytest.approx(mean_and_error([1.0, 2.0, 6.0])[1])
    assert math.isnan(error_of_mean(0.0, 1))


@pytest.mark.parametrize(
    ("freedom", "value"),
    [(1, 12.706), (2, 4.303), (10, 2.228), (11, 2.201), (30, 2.042), (600, 1.964)],
)
def test_student_quantile(freedom: int, value: float) -> None:
    assert student_quantile(freedom) == pytest.approx(value, abs=1.5e-3)
    assert student_quantile(0) == math.inf
    assert interval_half_width(0.5, freedom + 1) == student_quantile(freedom) * 0.5
    assert interval_half_width(0.0, 1) == math.inf


@pytest.mark.parametrize(
    ("value", "error", "sign", "shown"),
    [
        (1.23456, 0.0123, "", "1.235 ± 0.012"),
        (-0.5, 0.000012, "+", "−0.500000 ± 0.000012"),
        (0.5206, 0.0998, "", "0.52 ± 0.10"),
        (31.5725, 37.3061, "", "32 ± 37"),
        (18.4594, 1.6367, "", "18.5 ± 1.6"),
        (-0.01234, 0.00056, "+", "−0.01234 ± 0.00056"),
        (12345.6, 99.96, "", "12,346 ± 100"),
        (0.01, 160.2, "", "0 ± 160"),
        (663_835_693_724, 2_677_920_560_709, "", "6.64e+11 ± 2.7e+12"),
        (4.87e-6, 1.5e-7, "", "(4.87 ± 0.15)e−6"),
        (-2.4e-6, 2.4e-6, "+", "(−2.4 ± 2.4)e−6"),
        (2.0, math.nan, "", "2.0000"),
        (2.0, None, "+", "+2.0000"),
        (25.8702, None, "", "25.87"),
        (12345.6, None, "", "12,346"),
        (2.5e-5, None, "", "2.5e−05"),
        (0.0, 0.0, "+", "+0.0000"),
        (math.inf, math.nan, "", "not finite"),
        (None, None, "", "not finite"),
    ],
)
def test_figures_are_shown_to_the_second_digit_of_their_error(
    value: float | None, error: float | None, sign: str, shown: str
) -> None:
    assert format_estimate(value, error, sign) == shown


@pytest.mark.parametrize(
    ("value", "error", "sign", "shown"),
    [
        (-6.15e-4, 0.5e-4, "+", "−6.15e−4"),
        (5e-4, 0.5e-4, "+", "+5.00e−4"),
        (-0.321, 0.021, "+", "−0.321"),
        (12345.6, 99.96, "", "12,346"),
        (2.0, None, "", "2.0000"),
    ],
)
def test_an_edge_is_shown_to_the_error_of_its_middle(
    value: float, error: float | None, sign: str, shown: str
) -> None:
    assert round_to_error(value, error, sign) == shown
