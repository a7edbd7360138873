"""One figure from many examples: its standard error, and paired differences between models.

Every figure here is f(r) of a ratio r = Σ values / Σ weights over examples: an accuracy has weights
1 and f(r) = r; a perplexity has nats as values, tokens as weights and f(r) = eʳ. To first order an
example i moves the figure by

    u_i = f'(r) · (values_i − r · weights_i) / mean(weights),

so that its standard error is √(Σ u_i² / (n (n − 1))), and that of the difference between two models
on the same examples is the same of u_i − u'_i: what both find hard cancels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from wakeful.estimates import Estimate

_LARGEST = 709.0
"""e to more than this is no double."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A model's figure on the examples of a task."""

    model: str
    task: str
    metric: str
    keys: tuple[str, ...]
    """What names each example: models are paired where all keys are the same."""
    values: np.ndarray
    weights: np.ndarray
    exponential: bool = False
    """Whether the figure is e to the ratio (a perplexity) and not the ratio itself."""
    higher_is_better: bool = True

    @property
    def figure(self) -> float:
        """f(Σ values / Σ weights); infinite where that overflows."""
        ratio = self._ratio
        if not self.exponential:
            return ratio
        return math.exp(ratio) if ratio < _LARGEST else math.inf

    @property
    def error(self) -> float:
        """The standard error; NaN for a single example or an infinite figure."""
        return _error(self.moves)

    @property
    def moves(self) -> np.ndarray:
        """How far each example moves the figure: u_i above, times n."""
        slope = self.figure if self.exponential else 1.0
        ratio = self._ratio
        if not math.isfinite(slope * ratio):
            return np.full(len(self.values), math.nan)
        return slope * (self.values - ratio * self.weights) / self.weights.mean()

    @property
    def _ratio(self) -> float:
        return float(self.values.sum() / self.weights.sum())


def difference(score: Score, baseline: Score) -> Estimate | None:
    """Return score − baseline with its paired standard error; None if the examples differ."""
    if score.keys != baseline.keys:
        return None
    return score.figure - baseline.figure, _error(score.moves - baseline.moves)


def tidy(scores: Sequence[Score]) -> pl.DataFrame:
    """Return one row an example: model, task, metric, example, key, value, weight."""
    frames = [
        pl.DataFrame(
            {
                "model": [score.model] * len(score.keys),
                "task": [score.task] * len(score.keys),
                "metric": [score.metric] * len(score.keys),
                "example": np.arange(len(score.keys)),
                "key": list(score.keys),
                "value": score.values.astype(np.float64),
                "weight": score.weights.astype(np.float64),
            }
        )
        for score in scores
    ]
    return pl.concat(frames)


def _error(moves: np.ndarray) -> float:
    count = len(moves)
    if count < 2:
        return math.nan
    return math.sqrt(float((moves**2).sum()) / (count * (count - 1)))
