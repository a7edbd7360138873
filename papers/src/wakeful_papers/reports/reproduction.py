"""The report of a reproduced exhibit."""

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
from wakeful_papers.exhibits.judge import Basis, Verdict, VerdictOutcome
from wakeful_papers.exhibits.plan import Plan
from wakeful_papers.exhibits.size import H100
from wakeful_papers.exhibits.total import total_cost
from wakeful_papers.reports.charts import draw_exhibit, figure_values, published_row

OUTCOMES: tuple[VerdictOutcome, ...] = get_args(VerdictOutcome)
BASES: tuple[Basis, ...] = get_args(Basis)


@dataclass(frozen=True)
class RunFacts:
    """Facts about all runs, taken from the first: text, machine, arithmetic."""

    text: str
    tokens: str
    machine: str
    dtype: str

    @classmethod
    def from_run(cls, run: TrainedRun) -> "RunFacts":
        """Return the facts of a finished run."""
        data = run.data
        return cls(
            data.text,
            f"{data.trained} training and {data.validation_tokens:,} validation tokens, vocabulary "
            f"{data.vocab_size:,}",
            _machine(run.environment), run.config.train.dtype,
        )  # fmt: skip

    @classmethod
    def from_plan(cls, plan: Plan, environment: Environment) -> "RunFacts":
        """Return the facts of a plan that trains nothing."""
        count = plan.tokens_per_seed
        tokens = f"{count:,} tokens a seed, one stretch after another from its beginning"
        return cls(plan.text, tokens, _machine(environment), "float32")  # as `load` reads them


def _machine(environment: Environment) -> str:
    return f"{environment.computer}; torch {environment.torch}, wakeful {environment.wakeful}"


def format_headline(plan: Plan, facts: RunFacts, results: Results) -> str:
    """Return the scale as text, named beside verdicts because they hold for no other."""
    counts = (row.figures.get("parameters", 0.0) for row in results.measurements.values())
    parameters = plan.parameters or max(counts, default=0.0)
    tokens = plan.tokens or plan.tokens_per_seed
    stand_ins = "".join(f"; {note}" for note in plan.stand_in_notes)
    lengths = sorted({job.config.train.length for job in plan.jobs})
    length = f", {' and '.join(f'{n:,}' for n in lengths)} tokens long" if lengths else ""
    return (
        f"{plan.scale} scale: {parameters / 1e6:,.2f}M parameters, {tokens:,} tokens of "
        f"{facts.text}{length}, {len(plan.seeds)} seed{'s' if len(plan.seeds) > 1 else ''}"
        f"{_rotation_note(plan)}{stand_ins}"
    )


def _rotation_note(plan: Plan) -> str:
    """Return a note on OrthoAdam's rotations if they are not the paper's, Haar's; "" otherwise."""
    optimizers = (job.config.optimizer for job in plan.jobs)
    names = {optim.rotation for optim in optimizers if optim.name == "orthoadam"} - {"haar"}
    return (
        f"; OrthoAdam rotates by {', '.join(sorted(names))}, in the paper by Haar" if names else ""
    )


def verdict_sentence(verdict: Verdict) -> str:
    """Return a claim, its difference and its verdict as a sentence."""
    group = f" ({verdict.group})" if verdict.group else ""
    reason = f" ({verdict.because})" if verdict.outcome == "not applicable" else ""
    return f"{verdict.says}{group}: {format_difference(verdict)[0]}: {verdict.outcome}{reason}."


def format_difference(verdict: Verdict) -> tuple[str, str]:
    """Return a difference and its 95% interval as texts, to the second digit of the error; the
    interval is "" for a single seed and for a difference that was not measured.
    """
    if verdict.difference is None:
        return "not measured", ""
    difference = format_estimate(verdict.difference, verdict.error, "+")
    if verdict.error is None:
        return f"{difference}, one seed", ""
    edges = (round_to_error(edge, verdict.error, "+") for edge in (verdict.low, verdict.high))
    return difference, " to ".join(edges)


def exhibit_report(
    plan: Plan, results: Results, verdicts: Sequence[Verdict], facts: RunFacts
) -> Report:
    """Return an exhibit's report: claims, the paper's charts, our figures next to the paper's."""
    exhibit, counts = plan.labeled_exhibit, count_outcomes(verdicts)
    outcomes = [(verdict.basis, verdict.outcome) for verdict in verdicts]
    claims = [
        [Cell(verdict.says, verdict.group, verdict_notes(verdict)),
         *claim_cells(verdict, _figure_title(exhibit, verdict.figure))]
        for verdict in verdicts
    ]  # fmt: skip
    return Report(
        exhibit.heading,
        [f"At {plan.scale} scale: {summarize_outcomes(outcomes)}"],
        suggest_next_scale(exhibit.name, {plan.scale}, counts),
        [
            Section("Verdict", [
                Text(f"At {format_headline(plan, facts, results)}:"),
                Text(exhibit.claim),
                Text("A verdict is of this scale and text, and speaks for no other.", "caveat"),
            ], brief=True),
            Section("Claims", [
                Table(["claim", *COLUMNS], claims, "Claims and verdicts", "claims",
                      terminal=("verdict", "here", "95% interval")),
                Text(READING, "note"),
                *([Text("Without these runs, which diverged:"), BulletList(results.diverged)]
                  if results.diverged else []),
            ], brief=True),
            *(Section(title, [Chart(title, lambda drawing=drawing: drawing, explained=line)])
              for title, line, drawing in draw_exhibit(exhibit, results)),
            Section("Figures", [
                *_tables(exhibit, results),
                terms([("loss", "loss"), *((column.title, column.figure)
                       for column in exhibit.table.columns)]),
                Text(f"Means over seeds ± one standard error. {exhibit.table.note}", "note"),
            ]),
            _method_section(plan, results, facts),
        ],
    )  # fmt: skip


COLUMNS = ("verdict", "paper", "here", "95% interval", "seeds")
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
    """Return a claim's row of cells for the columns `COLUMNS`."""
    (difference, interval), printed = format_difference(verdict), list[str]()
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
        Cell(difference, under=(figure,) if figure else ()),
        Cell("–" if verdict.low is None else interval, under=size),
        Cell(str(verdict.seeds)),
    ]  # fmt: skip


def verdict_notes(verdict: Verdict) -> list[str]:
    """Return notes on a verdict: its basis, and its premise or why it is not applicable."""
    direct = f"; the difference alone: {verdict.direct}" if verdict.direct else ""
    because = f"{verdict.because}{direct}" if verdict.because else ""
    return [*filter(None, (verdict.basis, because))]


def _method_section(plan: Plan, results: Results, facts: RunFacts) -> Section:
    exhibit, total = plan.labeled_exhibit, total_cost([plan])
    seconds = sum(row.figures.get("seconds", 0.0) for row in results.measurements.values())
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
    duration = f"{format_duration(seconds)} in all on " if plan.jobs else ""
    entries = [
        ("Exhibit", f"{exhibit.name}, {exhibit.title}"),
        ("Scale", f"{format_headline(plan, facts, results)}; {total.tokens:,.0f} tokens over all "
                  "rows and seeds"),
        ("Text", f"{facts.text}; {facts.tokens}{elsewhere}"),
        ("Seeds", f"{', '.join(map(str, plan.seeds))}; {'; '.join(filter(None, seeds))}"),
        *([("Stand-ins", "; ".join(plan.stand_in_notes))] if plan.stand_in_notes else []),
        ("Trained for" if plan.jobs else "Machine",
         f"{duration}{facts.machine}; {facts.dtype}{roughly}"),
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


def _figure_title(exhibit: Exhibit, figure: str) -> str:
    """Return the title of a figure's column or of its measure's without options, or the figure."""
    titles = {"loss": "validation loss"}
    titles |= {column.figure: column.title for column in exhibit.table.columns}
    return titles.get(figure) or titles.get(figure.partition("(")[0], figure)


def count_outcomes(verdicts: Iterable[Verdict]) -> dict[VerdictOutcome, int]:
    """Return the number of claims for each outcome, also if it is 0."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    return {outcome: counts[outcome] for outcome in OUTCOMES}


def summarize_outcomes(verdicts: Sequence[tuple[str, str]]) -> str:
    """Return the number of claims for each outcome, in words, from (basis, outcome) of each claim.

    Claims with another basis than what the paper says and measures are counted apart.
    """
    sentences: list[str] = []
    for basis in BASES:
        counts = {outcome: verdicts.count((basis, outcome)) for outcome in OUTCOMES}
        if total := sum(counts.values()):
            basis_text = f" {basis}" if basis else ""
            outcomes = listed(f"{count} {outcome}" for outcome, count in counts.items() if count)
            sentences.append(f"{total} claim{'s' * (total > 1)}{basis_text}: {outcomes}")
    first, *rest = sentences or ["none judged"]
    return f"{first}." + (f" Counted apart: {'; '.join(rest)}." if rest else "")


def suggest_next_scale(
    exhibit: str, scales: Set[str], counts: Mapping[VerdictOutcome, int]
) -> list[NextStep]:
    """Return the command for the scale after a single one, if there is an unresolved claim."""
    larger = {"tiny": "small", "small": "paper"}.get(*scales) if len(scales) == 1 else None
    if larger is None or not counts["not resolved"]:
        return []
    command = f"wakeful reproduce {exhibit} --scale {larger}"
    return [NextStep("try unresolved claims at the next scale", command)]


def _tables(exhibit: Exhibit, results: Results) -> Iterator[Part]:
    """Yield a table for each group, with our figures and the paper's."""
    columns = [(column.figure, column.title) for column in exhibit.table.columns]
    if "loss" not in [name for name, _ in columns]:
        columns.insert(0, ("loss", "validation loss"))
    for group in results.groups:
        rows = []
        for row in results.rows:
            if not any((group, row, seed) in results.measurements for seed in results.seeds):
                continue
            cells = []
            for name, _ in columns:
                values = figure_values(results, group, row, name)
                printed = exhibit.table.cells.get((published_row(exhibit, group, row), name))
                under = [f"paper {_format(printed)}"] if isinstance(printed, int | float) else []
                value = format_estimate(*mean_and_error(values)) if values else "–"
                cells.append(Cell(value, under=under))
            rows.append([exhibit.table.labels.get(row, row), *cells])
        label = exhibit.groups[group].label if group in exhibit.groups else ""
        if label:
            yield Text(label, "heading")
        yield Table(["row", *(title for _, title in columns)], rows, label or "Figures", "paper")


def _format(value: float) -> str:
    return (f"{value:,.0f}" if value >= 1000 else f"{value:.4g}").replace("-", "−")
