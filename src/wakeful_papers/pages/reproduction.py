"""The page of a reproduced exhibit: drawn as the paper draws it, ours beside the published."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from wakeful.comparison.reading import TrainedRun
from wakeful.config.schema import config_to_toml
from wakeful.device import H100
from wakeful.display import duration
from wakeful.estimates import mean_and_error, to_error, with_error
from wakeful.pages.charts import (
    unchecked,
)
from wakeful.pages.page import Step, listed, write_page
from wakeful.runs.run import Environment
from wakeful_papers.exhibits.derived import Results
from wakeful_papers.exhibits.exhibit import Exhibit
from wakeful_papers.exhibits.judge import Basis, Fate, Verdict
from wakeful_papers.exhibits.plan import Plan
from wakeful_papers.exhibits.total import total_of
from wakeful_papers.pages.charts import drawn, named, values_of

OUTCOMES: tuple[Fate, ...] = get_args(Fate)
BASES: tuple[Basis, ...] = get_args(Basis)


@dataclass(frozen=True)
class Facts:
    """What the first run says of all: text, machine, arithmetic."""

    text: str
    tokens: str
    machine: str
    dtype: str

    @classmethod
    def of(cls, run: TrainedRun) -> "Facts":
        """Return the facts of a finished run."""
        data = run.data
        trained = f"{data.train_tokens:,}" if data.train_tokens else "endless"
        return cls(
            data.text,
            f"{trained} training and {data.validation_tokens:,} validation tokens, vocabulary "
            f"{data.vocab_size:,}",
            _machine(run.environment), run.config.train.dtype,
        )  # fmt: skip

    @classmethod
    def of_reading(cls, plan: Plan, environment: Environment) -> "Facts":
        """Return the facts where nothing is trained."""
        tokens = f"{plan.stretch:,} tokens a seed, one stretch after another from its beginning"
        return cls(plan.text, tokens, _machine(environment), plan.config.train.dtype)


def _machine(environment: Environment) -> str:
    return f"{environment.computer}; torch {environment.torch}, wakeful {environment.wakeful}"


def headline(plan: Plan, facts: Facts, results: Results) -> str:
    """Return the scale in words: a verdict never speaks for another."""
    named = (seen.figures.get("parameters", 0.0) for seen in results.seen.values())
    parameters = plan.parameters or max(named, default=0.0)
    tokens = plan.tokens or plan.stretch
    stand_ins = "".join(f"; {words}" for words in plan.stand_ins)
    return (
        f"{plan.scale} scale: {parameters / 1e6:,.2f}M parameters, {tokens:,} tokens of "
        f"{facts.text}, {len(plan.seeds)} seed{'s' if len(plan.seeds) > 1 else ''}{stand_ins}"
    )


def sentence(verdict: Verdict) -> str:
    """Return a claim, what was found and the verdict, in a line."""
    where = f" ({verdict.group})" if verdict.group else ""
    why = f" ({verdict.because})" if verdict.outcome == "not applicable" else ""
    return f"{verdict.says}{where}: {Found.of(verdict).difference}: {verdict.outcome}{why}."


@dataclass(frozen=True)
class Found:
    """What was found of a claim, in words."""

    difference: str
    interval: str
    """Of 95%; empty of a single seed."""

    @classmethod
    def of(cls, verdict: Verdict) -> "Found":
        """Return a difference and its interval to the second digit of the error."""
        if verdict.difference is None:
            return cls("not measured", "")
        found = with_error(verdict.difference, verdict.error, "+")
        if verdict.error is None:
            return cls(f"{found}, one seed", "")
        edges = (to_error(edge, verdict.error, "+") for edge in (verdict.low, verdict.high))
        return cls(found, " to ".join(edges))


@unchecked
def write_reproduction(
    path: Path, plan: Plan, results: Results, verdicts: Sequence[Verdict], facts: Facts
) -> Path:
    """Write the page of an exhibit; an old page stays until the new one is whole."""
    exhibit = plan.shown
    configs = {
        " ".join(filter(None, (job.group, job.row))): config_to_toml(job.config)
        for job in plan.jobs
    }
    counts, total = counted(verdicts), total_of([plan])
    of_all = [(each.basis, each.outcome) for each in verdicts]
    return write_page(
        path,
        "reproduction",
        package="wakeful_papers.pages",
        title=exhibit.heading,
        exhibit=exhibit,
        headlines=[f"At {plan.scale} scale: {told_apart(of_all)}"],
        steps=next_scale(exhibit.name, {plan.scale}, counts),
        headline=headline(plan, facts, results),
        counts=counts,
        verdicts=verdicts,
        found=[Found.of(each) for each in verdicts],
        words=[_words(exhibit, each.figure) for each in verdicts],
        charts=drawn(exhibit, results),
        tables=_tables(exhibit, results),
        terms=[("loss", "loss")] + [(each.title, each.figure) for each in exhibit.table.columns],
        facts=facts,
        plan=plan,
        here=duration(sum(seen.figures.get("seconds", 0.0) for seen in results.seen.values())),
        hours=total.operations / H100 / 3600,
        all_tokens=total.tokens,
        configs=configs,
        diverged=results.diverged,
    )


def _words(exhibit: Exhibit, figure: str) -> str:
    """Return what a figure is called: as its column is, or the column of the measure it varies."""
    titles = {column.figure: column.title for column in exhibit.table.columns}
    titles = {"loss": "validation loss"} | titles
    return titles.get(figure) or titles.get(figure.partition("(")[0], figure)


def counted(verdicts: Iterable[Verdict]) -> dict[Fate, int]:
    """Return how many claims came out how, those of no claim among them."""
    found = Counter(each.outcome for each in verdicts)
    return {outcome: found[outcome] for outcome in OUTCOMES}


def in_words(counts: Mapping[Any, int]) -> str:
    """Return what came out, without what did not."""
    told = listed(f"{count} {outcome}" for outcome, count in counts.items() if count)
    return told or "none judged"


def told_apart(verdicts: Sequence[tuple[str, str]]) -> str:
    """Return how many claims came out how, from the basis and the outcome of each.

    What the paper neither says nor measures so is counted apart.
    """
    sentences: list[str] = []
    for basis in BASES:
        counts = {each: verdicts.count((basis, each)) for each in OUTCOMES}
        if count := sum(counts.values()):
            what = f" {basis}" if basis else ""
            sentences.append(f"{count} claim{'s' * (count > 1)}{what}: {in_words(counts)}")
    return f"{'; besides, '.join(sentences) or 'none judged'}."


def next_scale(exhibit: str, scales: Set[str], counts: Mapping[Fate, int]) -> list[Step]:
    """Return the next larger scale as what to do where a claim is not resolved."""
    larger = {"tiny": "small", "small": "paper"}.get(*scales) if len(scales) == 1 else None
    if larger is None or not counts["not resolved"]:
        return []
    command = f"wakeful reproduce {exhibit} --scale {larger}"
    return [Step("try what is not resolved at the next scale", command)]


def _tables(exhibit: Exhibit, results: Results) -> list[tuple[str, list[str], list[Any]]]:
    """Return a table a group: its heading, the columns and the rows with ours and the paper's."""
    columns = [(column.figure, column.title) for column in exhibit.table.columns]
    if "loss" not in [name for name, _ in columns]:
        columns.insert(0, ("loss", "validation loss"))
    found = []
    for group in results.groups:
        rows = []
        for row in results.rows:
            if not any((group, row, seed) in results.seen for seed in results.seeds):
                continue
            cells = []
            for name, _ in columns:
                values = values_of(results, group, row, name)
                printed = exhibit.table.cells.get((named(exhibit, group, row), name))
                cells.append((
                    with_error(*mean_and_error(values)) if values else "–",
                    printed if isinstance(printed, int | float) else None,
                ))  # fmt: skip
            rows.append((exhibit.table.labels.get(row, row), cells))
        label = exhibit.groups[group].label if group in exhibit.groups else ""
        found.append((label, [title for _, title in columns], rows))
    return found
