"""One figure from many examples: its standard error, and paired differences between models.

Every figure is an `estimates.Figure` over examples: an accuracy has weights 1; a perplexity has
nats as values and tokens as weights.
"""

import dataclasses
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
    shots: int = 0
    """Solved examples before each question."""
    is_cost: bool = False
    """Whether models are compared by the ratio, as sizes and speeds are."""

    @property
    def title(self) -> str:
        """Return the task with its shots, and the metric."""
        told = f", {self.shots} shot{'s' * (self.shots > 1)}" if self.shots else ""
        return f"{self.task}{told}: {self.metric}"

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


def averages(scores: Sequence[Score]) -> list[Score]:
    """Return the mean over tasks of each metric that two or more tasks have, for one model.

    Tasks count alike, however many examples they have: with n_t examples of mean m_t and variance
    σ_t² in task t the average is Σ m_t / T and its error √(n/(n−1) Σ_t σ_t² / n_t) / T, where n is
    all examples: they scatter around their own task's mean. Perplexities are not averaged.
    """
    found: list[Score] = []
    plain = [score for score in scores if not score.exponential and len(score.keys) > 1]
    for metric in dict.fromkeys(score.metric for score in plain):
        tasks = [score for score in plain if score.metric == metric]
        if len(tasks) < 2:
            continue
        mean = float(np.mean([score.figure for score in tasks]))
        # Values around their task's mean, moved to the average: their ratio and spread are as said.
        weights = [score.weights / score.weights.sum() for score in tasks]
        values = [
            (score.values - score.figure * score.weights) / score.weights.sum() + mean * weight
            for score, weight in zip(tasks, weights, strict=True)
        ]
        found.append(
            dataclasses.replace(
                tasks[0], task=f"average of {len(tasks)} tasks", shots=0,
                keys=tuple(f"{score.task}/{key}" for score in tasks for key in score.keys),
                values=np.concatenate(values), weights=np.concatenate(weights),
            )
        )  # fmt: skip
    return found


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
