"""Verdicts: a published direction against the 95% interval of a paired difference over seeds.

One that presupposes what is not there, or that the baseline passes too, is not applicable; one
whose rows no run has measured is not run.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from wakeful.estimates import format_estimate, interval_half_width, mean_and_error
from wakeful_papers.exhibits.derived import TO_BASELINE, Results, figure_of
from wakeful_papers.exhibits.exhibit import ALIKE_LABELS, Claim, Exhibit, Premise, Scale
from wakeful_papers.exhibits.outcomes import MARGINS, Claimed, Outcome, outcome_of

Fate = Literal[Outcome, "not applicable", "not run"]
"""What becomes of a claim."""
Grounds = Literal[
    "", "by construction", "read off a table's cells", "loss in place of accuracy", "a stand-in's",
    "of ours",
]  # fmt: skip
"""What a verdict rests on besides what the paper says and measures; empty where on that alone."""


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
    outcome: Fate
    beside: str = ""
    """What it is compared with: a row's label, or a number."""
    asked: str = ""
    """What its premise asks for; empty where it has none."""
    basis: Grounds = ""
    because: str = ""
    """What its premise's figure came to where it has one; why it is not applicable."""
    premise: float | None = None
    """The mean over seeds of its premise's figure, in the row that should show it."""
    direct: Outcome | None = None
    """What the difference alone says, where that is not the outcome."""
    margin: float | None = None
    """The difference that counts as none; None for a claim of "lower" or "higher"."""

    @property
    def size(self) -> bool | None:
        """Whether the published difference lies in the interval; None where there is none, or of
        two seeds, whose interval holds nearly everything.
        """
        if self.published is None or self.low is None or self.high is None or self.seeds < 3:
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
    exhibit: Exhibit,
    results: Results,
    scale: Scale,
    tasks: Sequence[str],
    stand_ins: Container[str] = (),
) -> tuple[Verdict, ...]:
    """Judge the claims of an exhibit at a scale where models were asked these tasks.

    One that names no group is judged once in each. `stand_ins` are the rows and groups that are of
    other models than the paper's.
    """
    found: list[Verdict] = []
    for claim in exhibit.claims_at(scale, tasks):
        groups = [claim.group] if claim.group else list(results.groups)
        for group in groups:
            pair = _Pair(exhibit, claim, group, results)
            basis: Grounds = "read off a table's cells" if claim.read_off else ""
            if claim.own:
                basis = "of ours"
            if claim.by_construction:
                basis = "by construction"
            if exhibit.tasks and not tasks:
                basis = "loss in place of accuracy"
            if claim.row in stand_ins or group in stand_ins or pair.other[1] in stand_ins:
                basis = "a stand-in's"
            found.append(replace(pair.verdict(), basis=basis))
    return tuple(found)


@dataclass(frozen=True)
class _Pair:
    """A claim in a group."""

    exhibit: Exhibit
    claim: Claim
    group: str
    results: Results

    @property
    def other(self) -> tuple[str, str]:
        """Group and row that the claim's is compared with; of a number the baseline's."""
        claim = self.claim
        usual = claim.row if claim.than_group else self.exhibit.table.baseline
        return claim.than_group or self.group, claim.than or usual

    def verdict(self) -> Verdict:
        """Judge it."""
        claim, pairs = self.claim, self._pairs(self.claim.row)
        mean = error = low = high = None
        premise = claim.premise
        if pairs:
            mean, spread = mean_and_error([a - b for a, b in pairs])
            if not math.isnan(spread):
                error, beyond = spread, interval_half_width(spread, len(pairs))
                low, high = mean - beyond, mean + beyond
        groups = self.exhibit.groups
        label = groups[self.group].label if self.group in groups else ""
        told = Verdict(
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
            beside=self._beside(),
            asked=f"{premise.says}: {premise.figure} {premise.bar}" if premise else "",
            margin=self._margin(pairs) if claim.direction in MARGINS else None,
        )
        return self._held_to_premise(self._held_to_baseline(told))

    def _beside(self) -> str:
        if self.claim.than_value is not None:
            return f"{self.claim.than_value:g}"
        group, row = self.other
        label = (ALIKE_LABELS | dict(self.exhibit.table.labels)).get(row, row)
        groups = self.exhibit.groups
        return f"{label} ({groups[group].label})" if self.claim.than_group else label

    def _pairs(self, row: str) -> list[tuple[float, float]]:
        """Return the figure of a row and what it is compared with, of each seed that has both."""
        ours = self._figures(self.claim.figure, self.group, row)
        if self.claim.than_value is not None:
            return [(value, self.claim.than_value) for value in ours.values()]
        theirs = self._figures(self.claim.figure, *self.other)
        return [(value, theirs[seed]) for seed, value in ours.items() if seed in theirs]

    def _figures(self, figure: str, group: str, row: str) -> dict[int, float]:
        found = {
            seed: figure_of(self.results, group, row, seed, figure) for seed in self.results.seeds
        }
        return {seed: value for seed, value in found.items() if value is not None}

    def _margin(self, pairs: Sequence[tuple[float, float]]) -> float | None:
        """Return the difference that counts as none; None if it is a share of a figure that was not
        measured.
        """
        if self.claim.within is not None or not pairs:
            return self.claim.within
        return self.claim.same * abs(sum(b for _, b in pairs) / len(pairs))

    def _outcome(self, pairs: Sequence[tuple[float, float]]) -> Outcome:
        difference = mean_and_error([a - b for a, b in pairs]) if pairs else None
        return outcome_of(self.claim.direction, difference, len(pairs), self._margin(pairs) or 0.0)

    def _held_to_baseline(self, told: Verdict) -> Verdict:
        """Return a verdict on a number as not applicable where the baseline passes too.

        What is said of published models, of heirs beside their reference and by measures that
        compare with the baseline is no cure that it could do without. A reversal stands.
        """
        claim, baseline = self.claim, self.exhibit.table.baseline
        published = self.exhibit.scales["paper"].get("models", {})
        measure = claim.figure.partition("(")[0]
        if (
            claim.than_value is None or claim.alone or self.exhibit.inherit is not None
            or claim.row == baseline or {claim.row, baseline} & set(published)
            or measure in TO_BASELINE or told.outcome == "reversed"
        ):  # fmt: skip
            return told
        theirs = self._pairs(baseline)
        if self._outcome(theirs) != "confirmed":
            return told
        value = format_estimate(*mean_and_error([value for value, _ in theirs]))
        return _not_applicable(told, f"{baseline} passes too, with {value}")

    def _held_to_premise(self, told: Verdict) -> Verdict:
        """Return a verdict as not applicable where its phenomenon is in no row that it is about.

        These are the premise's row and, unless it is asked for there `only`, both that are
        compared, so that a row that has what its baseline lacks is judged. A reversal stands unless
        the whole 95% interval of every row is on the wrong side: a mean alone does not take one
        back.
        """
        premise = self.claim.premise
        if premise is None:
            return told
        rows = [] if premise.only else [self.other, (self.group, self.claim.row)]
        if premise.row:
            rows.insert(0, (self.group, premise.row))
        seen = {row: list(self._figures(premise.figure, *row).values()) for row in rows}
        measured = {row: values for row, values in seen.items() if values}
        if not measured or (told.outcome == "not run" and rows[0] not in measured):
            return replace(told, because=f"whether there is {premise.says} was not measured")
        (_, row), values = next(iter(measured.items()))
        mean = mean_and_error(values)
        value = f"{premise.figure} of {row} is {format_estimate(*mean)}, {premise.bar}"
        told = replace(
            told, premise=mean[0], because=told.because or f"{premise.says}: {value}"
        )  # fmt: skip
        surely = told.outcome == "reversed"
        if told.outcome == "not applicable" or not all(
            _absent(premise, each, surely=surely) for each in measured.values()
        ):
            return told
        return _not_applicable(told, f"no {premise.says.removeprefix('a ')}: {value}")


def _not_applicable(told: Verdict, because: str) -> Verdict:
    direct = None if told.outcome == "not run" else told.outcome
    assert direct != "not applicable"
    return replace(told, outcome="not applicable", direct=direct, because=because)


def _absent(premise: Premise, values: Sequence[float], *, surely: bool) -> bool:
    """Whether the mean shows no phenomenon or, `surely`, the whole 95% interval, which of a single
    seed is infinite.
    """
    mean, error = mean_and_error(values)
    beyond = interval_half_width(error, len(values)) if surely else 0.0
    edges = (mean - beyond, mean + beyond)
    return not math.isnan(beyond) and not any(map(premise.shown, edges))
