"""Scores of a model on many examples, with standard errors and paired differences between models.

Every score is an `estimates.Figure` over examples: an accuracy has weights 1; a perplexity has
nats as values and tokens as weights.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from wakeful.estimates import Estimate, Figure, confidence_interval, perplexity_interval


@dataclass(frozen=True, kw_only=True)
class Score:
    """A model's score on the examples of a task: Σ values / Σ weights, or e to that ratio."""

    model: str
    task: str
    metric: str
    keys: tuple[str, ...]
    """Identity of each example; two models' scores are paired where all keys are equal."""
    values: np.ndarray
    weights: np.ndarray
    exponential: bool = False
    """True where the figure is e to the ratio (a perplexity)."""
    higher_is_better: bool = True
    shots: int | None = 0
    """Solved examples before each question; None for a group whose tasks differ in it."""
    is_cost: bool = False
    """True where models are compared by their ratio: sizes and speeds."""
    implementation: str = ""
    """Of a cost that depends on it: the code that ran the model."""
    part_of: str = ""
    """The group that a task belongs to, where only the group was requested; tables leave such
    tasks out."""

    @property
    def title(self) -> str:
        """Return the task with its shots, and the metric."""
        shots = f", {self.shots} shot{'s' * (self.shots > 1)}" if self.shots else ""
        return f"{self.task}{shots}: {self.metric}"

    @property
    def figure(self) -> float:
        """Return Σ values / Σ weights, or e to it; infinite where that overflows."""
        return self.over_examples.value

    @property
    def error(self) -> float:
        """Return the standard error; NaN for a single example or an infinite figure."""
        return self.over_examples.estimate[1]

    @property
    def interval(self) -> tuple[float, float]:
        """Return the ends of the 95% confidence interval; for a perplexity e to the ends of the
        interval of its loss.
        """
        if self.exponential:
            return perplexity_interval(*self.in_nats.over_examples.estimate, len(self.keys))
        return confidence_interval(self.figure, self.error, len(self.keys))

    @property
    def in_nats(self) -> "Score":
        """Return the mean loss in nats for a perplexity; any other score is returned as it is."""
        return dataclasses.replace(self, exponential=False) if self.exponential else self

    @property
    def over_examples(self) -> Figure:
        """Return the score as a `Figure`: the value and weight of every example."""
        return Figure(self.values, self.weights, self.exponential)


def paired_difference(score: Score, baseline: Score) -> Estimate | None:
    """Return score − baseline with its paired standard error; None if the examples differ.

    Of perplexities it is the difference of the losses, in nats per token.
    """
    if score.keys != baseline.keys:
        return None
    return score.in_nats.over_examples.minus(baseline.in_nats.over_examples)


def score_ratio(score: Score, baseline: Score) -> Estimate:
    """Return score / baseline and its standard error, for two independent measurements."""
    value = score.figure / baseline.figure
    relative = math.hypot(score.error / score.figure, baseline.error / baseline.figure)
    return value, abs(value) * relative


def can_combine(scores: Sequence[Score]) -> bool:
    """Return True if `combine_scores` can average these scores: each is a mean (not a perplexity)
    over two or more examples.
    """
    return all(len(score.keys) > 1 and not score.exponential for score in scores)


def combine_scores(scores: Sequence[Score], shares: Sequence[float], task: str) -> Score:
    """Return a weighted mean of one model's scores, each of another task, as one score called
    `task` over all their examples.

    Task t has the mean m_t, the error e_t and the share a_t (`shares` add up to 1). The score is
    Σ a_t m_t and its error √(Σ a_t² e_t²), as in a stratified sample: examples scatter around the
    mean of their own task. The same holds for the paired difference between two models.
    """
    mean = sum(share * score.figure for share, score in zip(shares, scores, strict=True))
    num_examples = sum(len(score.keys) for score in scores)
    values: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    for share, score in zip(shares, scores, strict=True):
        n = len(score.keys)
        scale = num_examples * share / score.weights.sum()
        # `Figure` multiplies the variance of all N examples by N/(N − 1), where the task's own
        # error needs n/(n − 1).
        correction = math.sqrt(n / (n - 1) * (num_examples - 1) / num_examples)
        deviations = score.values - score.figure * score.weights
        task_weights = scale * score.weights
        weights.append(task_weights)
        # The examples scatter around the common mean as they did around that of their task.
        values.append(scale * correction * deviations + mean * task_weights)
    return dataclasses.replace(
        scores[0], task=task, shots=same_shots(scores),
        keys=tuple(f"{score.task}/{key}" for score in scores for key in score.keys),
        values=np.concatenate(values), weights=np.concatenate(weights),
    )  # fmt: skip


def same_shots(scores: Sequence[Score]) -> int | None:
    """Return the number of shots that all scores have; None where they differ."""
    shots = {score.shots for score in scores}
    return shots.pop() if len(shots) == 1 else None


def scores_table(scores: Sequence[Score]) -> pl.DataFrame:
    """Return a table with a row per example: model, task, metric, example, key, value, weight."""
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
