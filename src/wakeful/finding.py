"""A finding of a diagnosis: what was measured, and how good or bad that is."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "mixed", "bad", "unsure"]
"""Verdict of a finding; "unsure" where the measurement does not decide."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A recommendation for a finding, with its effect measured on windows of the model's text."""

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
