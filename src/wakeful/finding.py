"""A finding: what was measured, and how good or bad that is."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "mixed", "bad", "unsure"]
"""The last where the measurement does not tell."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do about what a model showed, as it was tried on windows of its text."""

    words: str
    arguments: str = ""
    """Of `wakeful cure MODEL`; empty where no cure that was tried helps."""


@dataclass(frozen=True)
class Finding:
    """One statement of the verdict: what was measured, what it means, what others have."""

    title: str
    level: Level
    text: str
    band: str
    """Published figures to compare with."""
