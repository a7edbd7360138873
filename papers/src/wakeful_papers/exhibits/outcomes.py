"""The outcome of a direction, by the 95% interval of a paired difference over seeds."""

from typing import Literal

from wakeful.estimates import Estimate, interval_half_width

Direction = Literal["lower", "higher", "same"]
Claimed = Literal["lower", "higher", "same", "not higher", "not lower"]
Outcome = Literal["confirmed", "reversed", "not resolved"]
MARGINS: tuple[Claimed, ...] = ("same", "not higher", "not lower")
"""Directions that a difference within a margin does not contradict."""


def outcome_of(
    direction: Claimed, difference: Estimate | None, seeds: int, margin: float
) -> Outcome:
    """Judge a direction by the difference d ± e over `seeds` pairs.

    With t, the 97.5% quantile of Student's t: `lower` and `higher` are confirmed where d ± t e
    leaves out zero on that side and reversed where it does on the other. `same` is confirmed where
    d ± t e lies within ± `margin`, and reversed where it lies wholly outside; `not higher` where it
    lies below `margin`, and reversed where it lies above; `not lower` is its mirror, at −`margin`.
    All else, and a single seed, is not resolved.
    """
    if difference is None:
        return "not resolved"
    beyond = interval_half_width(difference[1], seeds)  # infinite for a single seed
    low, high = difference[0] - beyond, difference[0] + beyond
    confirmed, reverse = {
        "same": (-margin <= low and high <= margin, low > margin or high < -margin),
        "not higher": (high < margin, low > margin),
        "not lower": (low > -margin, high < -margin),
        "lower": (high < 0, low > 0),
        "higher": (low > 0, high < 0),
    }[direction]
    return "confirmed" if confirmed else "reversed" if reverse else "not resolved"
