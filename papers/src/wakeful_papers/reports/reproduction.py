"""What is told of a reproduced exhibit."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import get_args

from wakeful.config.schema import config_to_toml
from wakeful.estimates import format_estimate, mean_and_error, round_to_error
from wakeful.reports.value import (
    BulletList,
    Cell,
    Chart,
    Fold,
    NextStep,
    Part,
    Report,
    Section,
    Table,
    Text,
    listed,
    method_section,
    terms,
)
from wakeful.runs.run import Environment
from wakeful.terminal.display import format_duration
from wakeful.training.compared import TrainedRun
from wakeful_papers.exhibits.derived import Results
from wakeful_papers.exhibits.exhibit import Exhibit
from wakeful_papers.exhibits.judge import Fate, Grounds, Verdict
from wakeful_papers.exhibits.plan import Plan
from wakeful_papers.exhibits.size import H100
from wakeful_papers.exhibits.total import total_of
from wakeful_papers.reports.charts import drawn, named, values_of

OUTCOMES: tuple[Fate, ...] = get_args(Fate)
BASES: tuple[Grounds, ...] = get_args(Grounds)


@dataclass(frozen=True)
class RunFacts:
    """What the first run says of all: text, machine, arithmetic."""

    text: str
    tokens: str
    machine: str
    dtype: str

    @classmethod
    def of(cls, run: TrainedRun) -> "RunFacts":
        """Return the facts of a finished run."""
        data = run.data
        return cls(
            data.text,
            f"{data.trained} training and {data.validation_tokens:,} validation tokens, vocabulary "
            f"{data.vocab_size:,}",
            _machine(run.environment), run.config.train.dtype,
        )  # fmt: skip

    @classmethod
    def of_reading(cls, plan: Plan, environment: Environment) -> "RunFacts":
        """Return the facts where nothing is trained."""
        tokens = f"{plan.stretch:,} tokens a seed, one stretch after another from its beginning"
        return cls(plan.text, tokens, _machine(environment), "float32")  # as `load` reads them


def _machine(environment: Environment) -> str:
    return f"{environment.computer}; torch {environment.torch}, wakeful {environment.wakeful}"


def headline(plan: Plan, facts: RunFacts, results: Results) -> str:
    """Return the scale in words: a verdict never speaks for another."""
    named = (seen.figures.get("parameters", 0.0) for seen in results.seen.values())
    parameters = plan.parameters or max(named, default=0.0)
    tokens = plan.tokens or plan.stretch
    stand_ins = "".join(f"; {words}" for words in plan.stand_ins)
    lengths = sorted({job.config.train.length for job in plan.jobs})
    length = f", {' and '.join(f'{each:,}' for each in lengths)} tokens long" if lengths else ""
    return (
        f"{plan.scale} scale: {parameters / 1e6:,.2f}M parameters, {tokens:,} tokens of "
        f"{facts.text}{length}, {len(plan.seeds)} seed{'s' if len(plan.seeds) > 1 else ''}"
        f"{_rotated(plan)}{stand_ins}"
    )


def _rotated(plan: Plan) -> str:
    """Return which rotations stand in OrthoAdam for the papers', which are Haar's."""
    optimizers = (job.config.optimizer for job in plan.jobs)
    names = {each.rotation for each in optimizers if each.name == "orthoadam"} - {"haar"}
    return (
        f"; OrthoAdam rotates by {', '.join(sorted(names))}, in the paper by Haar" if names else ""
    )


def sentence(verdict: Verdict) -> str:
    """Return a claim, what was found and the verdict, in a line."""
    where = f" ({verdict.group})" if verdict.group else ""
    why = f" ({verdict.because})" if verdict.outcome == "not applicable" else ""
    return f"{verdict.says}{where}: {found_of(verdict)[0]}: {verdict.outcome}{why}."


def found_of(verdict: Verdict) -> tuple[str, str]:
    """Return a difference and its 95% interval to the second digit of the error, in words.

    A single seed has no interval: "".
    """
    if verdict.difference is None:
        return "not measured", ""
    found = format_estimate(verdict.difference, verdict.error, "+")
    if verdict.error is None:
        return f"{found}, one seed", ""
    edges = (round_to_error(edge, verdict.error, "+") for edge in (verdict.low, verdict.high))
    return found, " to ".join(edges)


def reproduction_report(
    plan: Plan, results: Results, verdicts: Sequence[Verdict], facts: RunFacts
) -> Report:
    """Return what is told of an exhibit: drawn as the paper draws it, ours beside the published."""
    exhibit, counts = plan.shown, counted(verdicts)
    of_all = [(each.basis, each.outcome) for each in verdicts]
    claims = [
        [Cell(each.says, each.group, grounds(each)),
         *claim_cells(each, _words(exhibit, each.figure))]
        for each in verdicts
    ]  # fmt: skip
    return Report(
        exhibit.heading,
        [f"At {plan.scale} scale: {told_apart(of_all)}"],
        next_scale(exhibit.name, {plan.scale}, counts),
        [
            Section("Verdict", [
                Text(f"At {headline(plan, facts, results)}:"),
                Text(exhibit.claim),
                Text("A verdict is of this scale and text, and speaks for no other.", "caveat"),
            ], brief=True),
            Section("Claims", [
                Table(["claim", *JUDGED], claims, "Claims and verdicts", "claims",
                      terminal=("verdict", "here", "95% interval")),
                Text(READING, "note"),
                *([Text("Without these runs, which diverged:"), BulletList(results.diverged)]
                  if results.diverged else []),
            ], brief=True),
            *(Section(title, [Chart(title, lambda drawing=drawing: drawing, explained=line)])
              for title, line, drawing in drawn(exhibit, results)),
            Section("Figures", [
                *_tables(exhibit, results),
                terms([("loss", "loss"), *((each.title, each.figure)
                       for each in exhibit.table.columns)]),
                Text(f"Means over seeds ± one standard error. {exhibit.table.note}", "note"),
            ]),
            _method(plan, results, facts),
        ],
    )  # fmt: skip


JUDGED = ("verdict", "paper", "here", "95% interval", "seeds")
"""The columns of `claim_cells`."""
READING = (
    "Differences are paired over seeds, ± one standard error. A direction is confirmed or reversed "
    "where the 95% interval (Student's t) leaves out zero. A difference within a margin counts as "
    'none: "same" is confirmed where the interval lies within it, "not higher" where it lies below '
    'it, "not lower" where it lies above minus the margin. A claim is not applicable where what it '
    "is about (a sink, outliers, lazy layers, a loss to quantization) is in none of its rows, "
    "where a method that it compares with gains nothing, or where the baseline passes a number "
    "too; a reversal stands unless the whole interval of every row is on the wrong side. A single "
    "seed resolves nothing."
)


def claim_cells(verdict: Verdict, figure: str = "") -> list[Cell]:
    """Return what became of a claim, under the columns `JUDGED`."""
    (found, interval), printed = found_of(verdict), list[str]()
    if verdict.margin is not None:
        printed.append(f"margin {verdict.margin:.3g}")
    if verdict.published is not None:
        printed.append(f"{verdict.published:+.4g}".replace("-", "−"))
    size = ()
    if verdict.size is not None:
        size = (f"the paper's size is {'inside' if verdict.size else 'outside'}",)
    return [
        Cell(verdict.outcome, style=verdict.outcome),
        Cell(verdict.direction, under=printed),
        Cell(found, under=(figure,) if figure else ()),
        Cell("–" if verdict.low is None else interval, under=size),
        Cell(str(verdict.seeds)),
    ]  # fmt: skip


def grounds(verdict: Verdict) -> list[str]:
    """Return what a verdict rests on besides its difference."""
    alone = f"; the difference alone: {verdict.direct}" if verdict.direct else ""
    because = f"{verdict.because}{alone}" if verdict.because else ""
    return [*filter(None, (verdict.basis, because))]


def _method(plan: Plan, results: Results, facts: RunFacts) -> Section:
    exhibit, total = plan.shown, total_of([plan])
    here = format_duration(sum(seen.figures.get("seconds", 0.0) for seen in results.seen.values()))
    hours = total.operations / H100 / 3600
    seeds = [
        "a seed sets the initial weights, equal wherever names and shapes agree, and the order of "
        "the text"
        if plan.jobs
        else "",
        "a pretrained model reads another stretch of the text with each" if plan.existing else "",
    ]
    elsewhere = f"; layers are looked at on {plan.elsewhere}, too" if plan.elsewhere else ""
    roughly = f". On one H100 very roughly {hours:.2g} hours" if hours >= 0.01 else ""
    whole = f"{here} in all on " if plan.jobs else ""
    entries = [
        ("Exhibit", f"{exhibit.name}, {exhibit.title}"),
        ("Scale", f"{headline(plan, facts, results)}; {total.tokens:,.0f} tokens over all rows and "
                  "seeds"),
        ("Text", f"{facts.text}; {facts.tokens}{elsewhere}"),
        ("Seeds", f"{', '.join(map(str, plan.seeds))}; {'; '.join(filter(None, seeds))}"),
        *([("Stand-ins", "; ".join(plan.stand_ins))] if plan.stand_ins else []),
        ("Trained for" if plan.jobs else "Machine",
         f"{whole}{facts.machine}; {facts.dtype}{roughly}"),
        ("Numbers", "an exhibit is written in the paper's own numbers; here every row is the same "
                    "variation of this scale's model, and a number in which a row differs keeps "
                    "its ratio"),
    ]  # fmt: skip
    configs = {
        " ".join(filter(None, (job.group, job.row))): config_to_toml(job.config)
        for job in plan.jobs
    }
    return method_section(entries, *(
        Fold(f"Configuration of {name}", [Text(text, "code")]) for name, text in configs.items()
    ))  # fmt: skip


def _words(exhibit: Exhibit, figure: str) -> str:
    """Return what a figure is called: as its column is, or the column of the measure it varies."""
    titles = {"loss": "validation loss"}
    titles |= {column.figure: column.title for column in exhibit.table.columns}
    return titles.get(figure) or titles.get(figure.partition("(")[0], figure)


def counted(verdicts: Iterable[Verdict]) -> dict[Fate, int]:
    """Return how many claims came out how, those of no claim among them."""
    found = Counter(each.outcome for each in verdicts)
    return {outcome: found[outcome] for outcome in OUTCOMES}


def told_apart(verdicts: Sequence[tuple[str, str]]) -> str:
    """Return how many claims came out how, from the basis and the outcome of each.

    What the paper neither says nor measures so is counted apart.
    """
    sentences: list[str] = []
    for basis in BASES:
        counts = {each: verdicts.count((basis, each)) for each in OUTCOMES}
        if count := sum(counts.values()):
            what = f" {basis}" if basis else ""
            told = listed(f"{each} {outcome}" for outcome, each in counts.items() if each)
            sentences.append(f"{count} claim{'s' * (count > 1)}{what}: {told}")
    first, *apart = sentences or ["none judged"]
    return f"{first}." + (f" Counted apart: {'; '.join(apart)}." if apart else "")


def next_scale(exhibit: str, scales: Set[str], counts: Mapping[Fate, int]) -> list[NextStep]:
    """Return the next larger scale as what to do where a claim is not resolved."""
    larger = {"tiny": "small", "small": "paper"}.get(*scales) if len(scales) == 1 else None
    if larger is None or not counts["not resolved"]:
        return []
    command = f"wakeful reproduce {exhibit} --scale {larger}"
    return [NextStep("try unresolved claims at the next scale", command)]


def _tables(exhibit: Exhibit, results: Results) -> Iterator[Part]:
    """Yield a table a group, its rows with ours and the paper's figures."""
    columns = [(column.figure, column.title) for column in exhibit.table.columns]
    if "loss" not in [name for name, _ in columns]:
        columns.insert(0, ("loss", "validation loss"))
    for group in results.groups:
        rows = []
        for row in results.rows:
            if not any((group, row, seed) in results.seen for seed in results.seeds):
                continue
            cells = []
            for name, _ in columns:
                values = values_of(results, group, row, name)
                printed = exhibit.table.cells.get((named(exhibit, group, row), name))
                under = [f"paper {_number(printed)}"] if isinstance(printed, int | float) else []
                value = format_estimate(*mean_and_error(values)) if values else "–"
                cells.append(Cell(value, under=under))
            rows.append([exhibit.table.labels.get(row, row), *cells])
        label = exhibit.groups[group].label if group in exhibit.groups else ""
        if label:
            yield Text(label, "heading")
        yield Table(["row", *(title for _, title in columns)], rows, label or "Figures", "paper")


def _number(value: float) -> str:
    return (f"{value:,.0f}" if value >= 1000 else f"{value:.4g}").replace("-", "−")
