"""Means with their standard errors."""

import math

import numpy as np
from numpy.typing import ArrayLike

Estimate = tuple[float, float]
"""A mean and its standard error; the error is NaN where one value leaves nothing to judge by."""


def mean_and_error(values: ArrayLike) -> Estimate:
    """Return the mean and s / √n, with s the standard deviation of the n values (n − 1)."""
    array = np.asarray(values, dtype=np.float64)
    # From the first value on: values that are equal have their mean and no error, to the bit.
    apart = array - array[0]
    mean = float(array[0] + apart.mean())
    if array.size < 2:
        return mean, math.nan
    return mean, float(apart.std(ddof=1) / math.sqrt(array.size))


def ratio_and_error(totals: ArrayLike, counts: ArrayLike) -> Estimate:
    """Return Σ totals / Σ counts over clusters and its standard error.

    With r the ratio and e_i = totals_i − r · counts_i, the error is √(n/(n−1) Σ e_i²) / Σ counts
    (the ratio estimator's linearisation). For a loss, a cluster is a window: its tokens are not
    independent of each other, windows nearly are.
    """
    total, count = (np.asarray(values, dtype=np.float64) for values in (totals, counts))
    ratio = float(total.sum() / count.sum())
    size = total.size
    if size < 2:
        return ratio, math.nan
    residuals = total - ratio * count
    return ratio, float(math.sqrt(size / (size - 1) * (residuals**2).sum()) / count.sum())


def paired_ratio(ours: ArrayLike, theirs: ArrayLike, counts: ArrayLike) -> Estimate:
    """Return the mean of ours − theirs over all tokens, and its error over the clusters they share.

    With g_w = ours_w − theirs_w nats a token in window w of m_w tokens: r = Σ m_w g_w / Σ m_w,
    error √(n/(n−1) Σ (m_w (g_w − r))²) / Σ m_w. What both find hard cancels.
    """
    weights = np.asarray(counts, dtype=np.float64)
    gaps = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    return ratio_and_error(gaps * weights, weights)


def running_mean(values: ArrayLike, window: int) -> np.ndarray:
    """Return the mean of each value and up to window − 1 values before it."""
    array = np.asarray(values, dtype=np.float64)
    sums = np.concatenate([[0.0], np.cumsum(array)])
    ends = np.arange(1, array.size + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def student_quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t: how many standard errors make 95% confidence.

    Two seeds leave one degree of freedom, and then a difference has to exceed 12.7 standard errors.
    Past ten degrees of freedom the normal quantile's expansion in 1/ν is exact to three digits.
    """
    if freedom < 1:
        return math.inf
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def with_error(value: float, error: float, sign: str = "") -> str:
    """Return "value ± error" to four places, or to more where the error needs them."""
    if math.isnan(error):
        return f"{value:{sign}.4f}"
    places = 4 if error == 0 or error >= 0.001 else min(8, 1 - math.floor(math.log10(error)))
    return f"{value:{sign}.{places}f} ± {error:.{places}f}"
