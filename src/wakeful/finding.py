"""A finding: what was measured, and how good or bad that is."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "mixed", "bad", "unsure"]
"""The last where the measurement does not tell."""


@dataclass(frozen=True)
class Finding:
    """One statement of the verdict: what was measured, what it means, what others have."""

    title: str
    level: Level
    text: str
    band: str
    """Published figures to compare with."""
