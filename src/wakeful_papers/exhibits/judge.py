"""Verdicts: a published direction against the 95% interval of a paired difference over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wakeful.comparison.outcomes import Claimed, Outcome, outcome_of
from wakeful.estimates import mean_and_error, reach
from wakeful_papers.exhibits.derived import Results, figure_of
from wakeful_papers.exhibits.exhibit import Claim, Exhibit, Scale


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a claim."""

    says: str
    group: str
    """The label of the group it is judged in; empty where there is one alone."""
    figure: str
    direction: Claimed
    published: float | None
    difference: float | None
    """The mean over seeds; None where a run did not measure it."""
    error: float | None
    low: float | None
    """The 95% interval of the difference; None of a single seed."""
    high: float | None
    seeds: int
    outcome: Outcome

    @property
    def size(self) -> bool | None:
        """Whether the published difference lies in the interval; None where there is none."""
        if self.published is None or self.low is None or self.high is None:
            return None
        return self.low <= self.published <= self.high


@dataclass(frozen=True, kw_only=True)
class Judged:
    """summary.json of an exhibit."""

    exhibit: str
    """PAPER/EXHIBIT."""
    paper: str
    title: str
    claim: str
    """What the paper says it shows."""
    scale: str
    headline: str
    """The scale in words."""
    verdicts: tuple[Verdict, ...]


def verdicts(
    exhibit: Exhibit, results: Results, scale: Scale, tasks: Sequence[str]
) -> tuple[Verdict, ...]:
    """Judge the claims of an exhibit at a scale where models were asked these tasks.

    One that names no group is judged once in each.
    """
    found: list[Verdict] = []
    for claim in exhibit.claims_at(scale, tasks):
        groups = [claim.group] if claim.group else list(results.groups)
        found += [_verdict(exhibit, claim, group, results) for group in groups]
    return tuple(found)


def _verdict(exhibit: Exhibit, claim: Claim, group: str, results: Results) -> Verdict:
    other_row = claim.than or (claim.row if claim.than_group else exhibit.table.baseline)
    other_group = claim.than_group or group
    pairs: list[tuple[float, float]] = []
    for seed in results.seeds:
        ours = figure_of(results, group, claim.row, seed, claim.figure)
        theirs = claim.than_value
        if theirs is None:
            theirs = figure_of(results, other_group, other_row, seed, claim.figure)
        if ours is not None and theirs is not None:
            pairs.append((ours, theirs))
    difference = mean_and_error([a - b for a, b in pairs]) if pairs else None
    margin = claim.same * abs(sum(b for _, b in pairs) / len(pairs)) if pairs else 0.0
    resolved = difference is not None and not math.isnan(difference[1])
    beyond = reach(difference[1], len(pairs)) if resolved and difference else math.nan
    label = exhibit.groups[group].label if group in exhibit.groups else ""
    return Verdict(
        says=claim.says,
        group="" if claim.group else label,
        figure=claim.figure,
        direction=claim.direction,
        published=claim.published,
        difference=difference[0] if difference else None,
        error=difference[1] if resolved and difference else None,
        low=difference[0] - beyond if resolved and difference else None,
        high=difference[0] + beyond if resolved and difference else None,
        seeds=len(pairs),
        outcome=outcome_of(claim.direction, difference, len(pairs), margin),
    )
