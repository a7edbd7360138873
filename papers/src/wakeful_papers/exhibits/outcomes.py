"""The outcome of a direction, by the 95% interval of a paired difference over seeds."""

from typing import Literal

from wakeful.estimates import Estimate, interval_half_width

Direction = Literal["lower", "higher", "same"]
Claimed = Literal["lower", "higher", "same", "not higher", "not lower"]
Outcome = Literal["confirmed", "reversed", "not resolved"]
MARGINS: tuple[Claimed, ...] = ("same", "not higher", "not lower")
"""Directions with a margin, up to which a difference counts as none."""


def outcome_of(
    direction: Claimed, difference: Estimate | None, seeds: int, margin: float
) -> Outcome:
    """Judge a direction by the difference d ± e over `seeds` pairs.

    The interval is d ± t e, with t the 97.5% quantile of Student's t. `lower` and `higher` are
    confirmed if the interval lies on that side of zero, and reversed if it lies on the other.
    `same` is confirmed if the interval lies within ± `margin`, and reversed if it lies wholly
    outside. `not higher` is confirmed if it lies below `margin`, and reversed if above; `not lower`
    is its mirror at −`margin`. All else, and a single seed, is not resolved.
    """
    if difference is None:
        return "not resolved"
    half_width = interval_half_width(difference[1], seeds)  # infinite for a single seed
    low, high = difference[0] - half_width, difference[0] + half_width
    is_confirmed, is_reversed = {
        "same": (-margin <= low and high <= margin, low > margin or high < -margin),
        "not higher": (high < margin, low > margin),
        "not lower": (low > -margin, high < -margin),
        "lower": (high < 0, low > 0),
        "higher": (low > 0, high < 0),
    }[direction]
    return "confirmed" if is_confirmed else "reversed" if is_reversed else "not resolved"
