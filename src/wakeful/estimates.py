"""Means, ratios and perplexities with their standard errors, alone and as paired differences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

Estimate = tuple[float, float]
"""A mean and its standard error, which is NaN for a single value."""

_LARGEST_EXPONENT = 709.0
"""e to more than this is no longer a double."""
_SMALL, _LARGE = 1e-3, 1e7
"""Below and above them figures are written with a power of ten."""


@dataclass(frozen=True)
class Figure:
    """f(r) of the ratio r = Σ totals / Σ counts over n clusters, with f(r) = r or f(r) = eʳ.

    A mean loss has the nats of each window as totals and its tokens as counts, an accuracy has
    counts 1, and a perplexity is e to a mean loss. Clusters are what is nearly independent:
    windows, examples or sequences, not the tokens in them. To first order cluster i moves the
    figure by u_i / Σ counts with u_i = f'(r) · (totals_i − r · counts_i), which gives the error

        √(n/(n−1) Σ u_i²) / Σ counts

    (the ratio estimator's linearization, and for eʳ the delta method).
    """

    totals: np.ndarray
    counts: np.ndarray
    exponential: bool = False
    """True where the figure is e to the ratio (a perplexity)."""

    @property
    def ratio(self) -> float:
        """Return Σ totals / Σ counts."""
        return float(self.totals.sum() / self.counts.sum())

    @property
    def value(self) -> float:
        """Return f(r); infinite where that overflows."""
        return perplexity(self.ratio) if self.exponential else self.ratio

    @property
    def estimate(self) -> Estimate:
        """Return the figure and its error; NaN for a single cluster or an infinite figure."""
        return self.value, _error_of_sum(self._linearized()) / float(self.counts.sum())

    def minus(self, baseline: "Figure") -> Estimate:
        """Return this figure minus the baseline over the same clusters, with its paired error.

        With u_i, by which cluster i moves a figure (`_linearized`), it is the error of the sum
        Σ_i (u_i / Σ counts − u'_i / Σ counts'), the baseline's marked by '. What makes a cluster
        hard for both cancels.
        """
        changes = self._linearized() / self.counts.sum()
        baseline_changes = baseline._linearized() / baseline.counts.sum()
        return self.value - baseline.value, _error_of_sum(changes - baseline_changes)

    def _linearized(self) -> np.ndarray:
        """Return u_i = f'(r) (totals_i − r counts_i), by which each cluster i moves the figure f(r)
        to first order, times Σ counts; NaN where the figure is not finite.

        r is Σ totals / Σ counts, and f(r) is r or, for an exponential figure, eʳ.
        """
        ratio = self.ratio
        slope = self.value if self.exponential else 1.0  # f'(r)
        if not math.isfinite(slope * ratio):
            return np.full(len(self.totals), math.nan)
        return slope * (self.totals - ratio * self.counts)


def mean_and_error(values: ArrayLike) -> Estimate:
    """Return the mean of n values and its standard error s / √n, with the standard deviation s over
    n − 1; the error is NaN for a single value.
    """
    array = np.asarray(values, dtype=np.float64)
    # Computed by deviations from the first value: so equal values have an error of exactly 0.
    deviations = array - array[0]
    mean_deviation = deviations.mean()
    squares = float(((deviations - mean_deviation) ** 2).sum())
    return float(array[0] + mean_deviation), error_of_mean(squares, array.size)


def error_of_mean(squares: float, count: int) -> float:
    """Return s / √n from n and Σ (x − mean)²; NaN for a single value."""
    return math.sqrt(squares / (count - 1)) / math.sqrt(count) if count > 1 else math.nan


def ratio_and_error(totals: ArrayLike, counts: ArrayLike) -> Estimate:
    """Return Σ totals / Σ counts over clusters, with the standard error of `Figure`."""
    total, count = (np.asarray(values, dtype=np.float64) for values in (totals, counts))
    return Figure(total, count).estimate


def weighted_mean(means: ArrayLike, counts: ArrayLike) -> Estimate:
    """Return the mean Σ counts · means / Σ counts over clusters, and its standard error."""
    weights = np.asarray(counts, dtype=np.float64)
    return ratio_and_error(np.asarray(means, dtype=np.float64) * weights, weights)


def mean_paired_difference(
    losses: ArrayLike, baseline_losses: ArrayLike, counts: ArrayLike
) -> Estimate:
    """Return the token-weighted mean of `losses` − `baseline_losses` and its error over windows.

    Both have one mean loss per window, in the same order; pairing removes the variance between easy
    and hard windows.

    With g_w = loss_w − baseline_w nats per token in window w of m_w tokens: r = Σ m_w g_w / Σ m_w,
    error √(n/(n−1) Σ (m_w (g_w − r))²) / Σ m_w.
    """
    gaps = np.asarray(losses, dtype=np.float64) - np.asarray(baseline_losses, dtype=np.float64)
    return weighted_mean(gaps, counts)


def perplexity(loss: float) -> float:
    """Return e to a mean loss in nats per token; infinite where that overflows."""
    return math.inf if loss > _LARGEST_EXPONENT else math.exp(loss)


def finite_or_none(value: float | None) -> float | None:
    """Return a number; None in place of NaN, infinity or None, which JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def student_quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t with `freedom` degrees of freedom: the half-width of
    a 95% confidence interval in standard errors; infinite without any.

    Two seeds leave one degree of freedom, and then a difference has to exceed 12.7 standard errors.
    Past ten degrees of freedom ν, an expansion around the normal quantile in powers of 1/ν is exact
    to three digits.
    """
    if freedom < 1:
        return math.inf
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = 1.959964  # the normal quantile; below are the terms of the expansion
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def interval_half_width(error: float, count: int) -> float:
    """Return the half-width of the 95% confidence interval of an estimate over `count` clusters.

    It is t · error, with Student's t of count − 1 degrees of freedom; infinite for one cluster. A
    difference is resolved where its absolute value exceeds the half-width.
    """
    return student_quantile(count - 1) * error if count > 1 else math.inf


INTERVAL = "95% confidence interval (Student's t)"
"""The interval after ± in tables, of bars and bands, and of every comparison."""


def confidence_interval(value: float, error: float, count: int) -> tuple[float, float]:
    """Return the ends of the 95% confidence interval of an estimate over `count` clusters; NaN for
    one cluster or an error that is not finite.
    """
    half_width = interval_half_width(error, count)
    if not math.isfinite(half_width):
        return math.nan, math.nan
    return value - half_width, value + half_width


def format_interval(value: float | None, error: float | None, count: int, sign: str = "") -> str:
    """Return "value ± half-width" of the 95% confidence interval, as `format_estimate` writes it;
    `error` is the standard error over `count` clusters, None for an unknown one.
    """
    half_width = None if error is None else interval_half_width(error, count)
    return format_estimate(value, half_width, sign)


def perplexity_interval(loss: float, error: float, count: int) -> tuple[float, float]:
    """Return the ends of the 95% confidence interval of a perplexity, e to the power of the ends of
    the interval of the mean `loss`.

    `error` is the loss's standard error over `count` clusters; for one cluster the ends are NaN.
    """
    low, high = confidence_interval(loss, error, count)
    return perplexity(low), perplexity(high)


def format_perplexity(loss: float, error: float | None, count: int) -> str:
    """Return the perplexity of a mean loss as text with the ends of its 95% confidence interval,
    "perplexity (low to high)"; the perplexity alone if the interval is not finite.

    `error` is the loss's standard error over `count` clusters; None for an unknown one.
    """
    value = perplexity(loss)
    low, high = perplexity_interval(loss, math.nan if error is None else error, count)
    half_width = (high - low) / 2
    if not math.isfinite(half_width):  # no interval
        return format_estimate(value)
    # All three have as many decimals as the interval's half-width needs.
    value_text, low_text, high_text = (
        round_to_error(number, half_width) for number in (value, low, high)
    )
    return f"{value_text} ({low_text} to {high_text})"


NEGLIGIBLE = 5e-4
"""Nats per token: a smaller change of a loss counts as rounding, even if it is resolved."""

TOLERATED = 0.02
"""Nats per token: a larger rise of a loss never counts as harmless, however wide its interval."""


@dataclass(frozen=True)
class LossChange:
    """Change of a model's loss on the same windows of text, in nats per token, paired by window."""

    before: float
    after: float
    error: float
    """Standard error of the change; NaN for a single window."""
    windows: int

    @classmethod
    def between(cls, before: Sequence[float], after: Sequence[float]) -> "LossChange":
        """Return the change of the mean loss, from the loss of each window before and after."""
        old, new = (np.asarray(losses, dtype=np.float64) for losses in (before, after))
        _, error = mean_and_error(new - old)
        return cls(float(old.mean()), float(new.mean()), error, old.size)

    @property
    def change(self) -> float:
        """Loss after minus before."""
        return self.after - self.before

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval of the change; infinite for a single window."""
        half_width = interval_half_width(self.error, self.windows)
        return self.change - half_width, self.change + half_width

    @property
    def is_worse(self) -> bool:
        """True where the whole interval lies above what counts as rounding."""
        return self.interval[0] > NEGLIGIBLE

    @property
    def is_harmless(self) -> bool:
        """True where the loss is not resolved to be worse and its mean rises by at most 0.02."""
        return not self.is_worse and self.change <= TOLERATED

    def __str__(self) -> str:
        if self.windows < 2:
            return f"{self.change:+.3f} nats per token on a single window".replace("-", "−")
        return describe_change(self.change, self.interval)


def describe_change(change: float, ends: tuple[float, float]) -> str:
    """Return "change nats per token (95% interval low to high)"."""
    low, high = ends
    description = f"{change:+.3f} nats per token (95% interval {low:+.3f} to {high:+.3f})"
    return description.replace("-", "−")


def format_estimate(value: float | None, error: float | None = None, sign: str = "") -> str:
    """Return "value ± error" as text, both to the error's second digit; without an error the value
    alone, to four decimal places or significant digits.

    None, NaN and infinity are "not finite". `sign` "+" writes the sign of positive values too.
    """
    value_text, error_text, power = _format_parts(value, error, sign)
    text = f"{value_text} ± {error_text}" if error_text else value_text
    return f"({text}){power}" if power else text


def round_to_error(value: float | None, error: float | None, sign: str = "") -> str:
    """Return a value as text, rounded to the second digit of its error, without the error."""
    value_text, _, power = _format_parts(value, error, sign)
    return value_text + power


def _format_parts(value: float | None, error: float | None, sign: str) -> tuple[str, str, str]:
    """Return three texts: a value, its error ("" for None, 0 or one that is not finite), and the
    power of ten by which both are to be multiplied ("" for none), such as "e−5".
    """
    if value is None or not math.isfinite(value):
        return "not finite", "", ""
    half_width = 0.0
    if error is not None and math.isfinite(error) and error > 0:
        half_width = error
    has_error = half_width > 0
    size = max(abs(value), half_width)
    value_text, error_text, power = "", "", ""
    if has_error and size > _LARGE:  # each text has its own power of ten
        value_text, error_text = f"{value:{sign}.3g}", f"{half_width:.2g}"
    elif has_error and size < _SMALL:  # one power of ten for both
        exponent = math.floor(math.log10(size))
        value_text, error_text, _ = _format_parts(
            value / 10.0**exponent, half_width / 10.0**exponent, sign
        )
        power = f"e{exponent}"
    elif has_error:
        # The error's first two digits decide the decimal places. They are rounded before their
        # place is looked at: 0.0996 is 0.10.
        rounded_error = float(f"{half_width:.1e}")
        places = min(8, max(0, 1 - math.floor(math.log10(rounded_error))))
        value_text, error_text = f"{value:{sign},.{places}f}", f"{half_width:,.{places}f}"
    elif size > _LARGE or 0 < size < _SMALL:
        value_text = f"{value:{sign}.4g}"  # with a power of ten
    else:
        places = 4 if size < 10 else max(0, 3 - math.floor(math.log10(size)))
        value_text = f"{value:{sign},.{places}f}"
    return value_text.replace("-", "−"), error_text.replace("-", "−"), power.replace("-", "−")


def _error_of_sum(deviations: np.ndarray) -> float:
    """Return √(n/(n−1) Σ u²), the standard error of a sum over n clusters; NaN for one cluster.

    `deviations` holds each cluster's deviation u from the mean; all deviations add up to zero.
    """
    size = len(deviations)
    return math.sqrt(size / (size - 1) * float((deviations**2).sum())) if size > 1 else math.nan
