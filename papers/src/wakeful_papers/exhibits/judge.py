"""Verdicts: a published direction against the 95% interval of a paired difference over seeds.

A claim is not applicable if the phenomenon that it presupposes is absent, or if it compares a row
with a number that the baseline passes too. It is "not run" if no run has measured its rows.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from wakeful.estimates import format_estimate, interval_half_width, mean_and_error
from wakeful_papers.exhibits.derived import TO_BASELINE, Results, row_figure
from wakeful_papers.exhibits.exhibit import EQUAL_TRAINING_LABELS, Claim, Exhibit, Premise, Scale
from wakeful_papers.exhibits.outcomes import MARGINS, Claimed, Outcome, outcome_of

VerdictOutcome = Literal[Outcome, "not applicable", "not run"]
"""The outcome of a claim."""
Basis = Literal[
    "", "by construction", "read off a table's cells", "loss in place of accuracy", "a stand-in's",
    "of ours",
]  # fmt: skip
"""The basis of a verdict, if it is another than what the paper says and measures."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a claim, and the figures behind it."""

    says: str
    group: str
    """Label of the group that it is judged in; empty if the exhibit or the claim has only one."""
    figure: str
    direction: Claimed
    published: float | None
    difference: float | None
    """The mean over seeds; None if no run measured it."""
    error: float | None
    low: float | None
    """The 95% interval of the difference; None for a single seed."""
    high: float | None
    seeds: int
    outcome: VerdictOutcome
    beside: str = ""
    """The label of the row, or the number, that it is compared with."""
    asked: str = ""
    """Its premise in words, with the threshold; empty if it has none."""
    basis: Basis = ""
    because: str = ""
    """The value of its premise's figure, or why it is not applicable or its premise not known."""
    premise: float | None = None
    """The mean over seeds of its premise's figure, in the first of its rows that measured it."""
    direct: Outcome | None = None
    """The outcome by the difference alone, if it is another than `outcome`."""
    margin: float | None = None
    """Size up to which a difference counts as none; None for "lower", "higher" or if unknown."""

    @property
    def size(self) -> bool | None:
        """True if the published difference lies in the interval; None if there is none, or for
        fewer than three seeds: the interval of two contains nearly everything.
        """
        if self.published is None or self.low is None or self.high is None or self.seeds < 3:
            return None
        return self.low <= self.published <= self.high


@dataclass(frozen=True, kw_only=True)
class JudgedExhibit:
    """summary.json of an exhibit."""

    exhibit: str
    """PAPER/EXHIBIT."""
    paper: str
    title: str
    claim: str
    """The paper's statement of what it shows."""
    scale: str
    headline: str
    """The scale in words."""
    verdicts: tuple[Verdict, ...]


def judge_claims(
    exhibit: Exhibit, results: Results, scale: Scale, tasks: Sequence[str],
    stand_ins: Container[str] = (),
) -> tuple[Verdict, ...]:  # fmt: skip
    """Judge the claims of an exhibit at a scale if models were evaluated on these tasks.

    A claim that names no group is judged once per group. `stand_ins` are the rows and groups whose
    models are not the paper's.
    """
    verdicts: list[Verdict] = []
    for claim in exhibit.claims_at(scale, tasks):
        groups = [claim.group] if claim.group else list(results.groups)
        for group in groups:
            group_claim = _GroupClaim(exhibit, claim, group, results)
            basis: Basis = "read off a table's cells" if claim.read_off else ""
            if claim.own:
                basis = "of ours"
            if claim.by_construction:
                basis = "by construction"
            if exhibit.tasks and not tasks:
                basis = "loss in place of accuracy"
            if claim.row in stand_ins or group in stand_ins or group_claim.compared[1] in stand_ins:
                basis = "a stand-in's"
            verdicts.append(replace(group_claim.judge(), basis=basis))
    return tuple(verdicts)


@dataclass(frozen=True)
class _GroupClaim:
    """A claim, to be judged in one group."""

    exhibit: Exhibit
    claim: Claim
    group: str
    results: Results

    @property
    def compared(self) -> tuple[str, str]:
        """Group and row that the claim's row is compared with; the baseline's if with a number."""
        claim = self.claim
        default = claim.row if claim.than_group else self.exhibit.table.baseline
        return claim.than_group or self.group, claim.than or default

    def judge(self) -> Verdict:
        """Return the claim's verdict in this group."""
        claim, pairs = self.claim, self._pairs(self.claim.row)
        mean = error = low = high = None
        premise = claim.premise
        if pairs:
            mean, standard_error = mean_and_error([a - b for a, b in pairs])
            if not math.isnan(standard_error):
                error, half_width = standard_error, interval_half_width(standard_error, len(pairs))
                low, high = mean - half_width, mean + half_width
        groups = self.exhibit.groups
        label = groups[self.group].label if self.group in groups else ""
        verdict = Verdict(
            says=claim.says,
            group="" if claim.group else label,
            figure=claim.figure,
            direction=claim.direction,
            published=claim.published,
            difference=mean,
            error=error,
            low=low,
            high=high,
            seeds=len(pairs),
            outcome=self._outcome(pairs) if pairs else "not run",
            beside=self._comparison_label(),
            asked=f"{premise.says}: {premise.figure} {premise.threshold}" if premise else "",
            margin=self._margin(pairs) if claim.direction in MARGINS else None,
        )
        return self._check_premise(self._check_baseline(verdict))

    def _comparison_label(self) -> str:
        if self.claim.than_value is not None:
            return f"{self.claim.than_value:g}"
        group, row = self.compared
        label = (EQUAL_TRAINING_LABELS | dict(self.exhibit.table.labels)).get(row, row)
        groups = self.exhibit.groups
        return f"{label} ({groups[group].label})" if self.claim.than_group else label

    def _pairs(self, row: str) -> list[tuple[float, float]]:
        """Return (value of a row, value that it is compared with) for each seed that has both."""
        values = self._figures(self.claim.figure, self.group, row)
        if self.claim.than_value is not None:
            return [(value, self.claim.than_value) for value in values.values()]
        than_values = self._figures(self.claim.figure, *self.compared)
        return [(value, than_values[seed]) for seed, value in values.items() if seed in than_values]

    def _figures(self, figure: str, group: str, row: str) -> dict[int, float]:
        """Return a figure of a row by seed, for the seeds that measured it."""
        values = {
            seed: row_figure(self.results, group, row, seed, figure) for seed in self.results.seeds
        }
        return {seed: value for seed, value in values.items() if value is not None}

    def _margin(self, pairs: Sequence[tuple[float, float]]) -> float | None:
        """Return the size up to which a difference counts as none; None for a share of no pairs."""
        if self.claim.within is not None or not pairs:
            return self.claim.within
        return self.claim.same * abs(sum(b for _, b in pairs) / len(pairs))

    def _outcome(self, pairs: Sequence[tuple[float, float]]) -> Outcome:
        difference = mean_and_error([a - b for a, b in pairs]) if pairs else None
        return outcome_of(self.claim.direction, difference, len(pairs), self._margin(pairs) or 0.0)

    def _check_baseline(self, verdict: Verdict) -> Verdict:
        """Return a verdict on a number as not applicable if the baseline passes the number too.

        Claims about published models or heirs, and measures that compare with the baseline, are
        exempt, since they do not test a cure. A reversal stands, and so does "not run".
        """
        claim, baseline = self.claim, self.exhibit.table.baseline
        published = self.exhibit.scales["paper"].get("models", {})
        measure = claim.figure.partition("(")[0]
        if (
            claim.than_value is None or claim.alone or self.exhibit.inherit is not None
            or claim.row == baseline or {claim.row, baseline} & set(published)
            or measure in TO_BASELINE or verdict.outcome in ("reversed", "not run")
        ):  # fmt: skip
            return verdict
        baseline_pairs = self._pairs(baseline)
        if self._outcome(baseline_pairs) != "confirmed":
            return verdict
        value = format_estimate(*mean_and_error([value for value, _ in baseline_pairs]))
        return _not_applicable(verdict, f"{baseline} passes too, with {value}")

    def _check_premise(self, verdict: Verdict) -> Verdict:
        """Return a verdict as not applicable if none of its rows shows the premise's phenomenon.

        Its rows are the premise's and, unless that is the `only` one, both that are compared, so
        that a row is judged if it shows what its baseline lacks. A reversal stands unless the whole
        95% interval of every row is on the wrong side: a mean alone does not revoke it.
        """
        premise = self.claim.premise
        if premise is None:
            return verdict
        rows = [] if premise.only else [self.compared, (self.group, self.claim.row)]
        if premise.row:
            rows.insert(0, (self.group, premise.row))
        values_by_row = {row: list(self._figures(premise.figure, *row).values()) for row in rows}
        measured = {row: values for row, values in values_by_row.items() if values}
        if not measured or (verdict.outcome == "not run" and rows[0] not in measured):
            return replace(verdict, because=f"whether there is {premise.says} was not measured")
        (_, row), values = next(iter(measured.items()))
        mean = mean_and_error(values)
        value = f"{premise.figure} of {row} is {format_estimate(*mean)}, {premise.threshold}"
        because = verdict.because or f"{premise.says}: {value}"
        verdict = replace(verdict, premise=mean[0], because=because)
        by_interval = verdict.outcome == "reversed"
        if verdict.outcome == "not applicable" or not all(
            _is_absent(premise, values, by_interval=by_interval) for values in measured.values()
        ):
            return verdict
        return _not_applicable(verdict, f"no {premise.says.removeprefix('a ')}: {value}")


def _not_applicable(verdict: Verdict, because: str) -> Verdict:
    direct = None if verdict.outcome == "not run" else verdict.outcome
    assert direct != "not applicable"
    return replace(verdict, outcome="not applicable", direct=direct, because=because)


def _is_absent(premise: Premise, values: Sequence[float], *, by_interval: bool) -> bool:
    """Return True if the mean does not show the phenomenon or, `by_interval`, if nothing in the 95%
    interval does, which is infinite for a single seed.
    """
    mean, error = mean_and_error(values)
    half_width = interval_half_width(error, len(values)) if by_interval else 0.0
    edges = (mean - half_width, mean + half_width)
    return not math.isnan(half_width) and not any(map(premise.is_met, edges))
