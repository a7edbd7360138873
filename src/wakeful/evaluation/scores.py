"""One figure from many examples: its standard error, and paired differences between models.

Every figure is an `estimates.Figure` over examples: an accuracy has weights 1; a perplexity has
nats as values and tokens as weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from wakeful.estimates import Estimate, Figure


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
        """Return Σ values / Σ weights, or e to it; infinite where that overflows."""
        return self.over_examples.value

    @property
    def error(self) -> float:
        """Return the standard error; NaN for a single example or an infinite figure."""
        return self.over_examples.estimate[1]

    @property
    def over_examples(self) -> Figure:
        """Return the figure with what each example adds to it."""
        return Figure(self.values, self.weights, self.exponential)


def difference(score: Score, baseline: Score) -> Estimate | None:
    """Return score − baseline with its paired standard error; None if the examples differ."""
    if score.keys != baseline.keys:
        return None
    return score.over_examples.minus(baseline.over_examples)


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
