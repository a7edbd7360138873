"""What a comparison found: in plain words, on the terminal, and as one offline HTML page."""

import math
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import polars as pl
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wakeful.comparison.outcomes import Outcome
from wakeful.comparison.paper_table import paper_tables
from wakeful.comparison.ranks import Ranking, lacks_common_seed, ranking_of
from wakeful.comparison.reading import Comparison
from wakeful.comparison.tables import (
    Growth,
    differing_fields,
    machines,
    paired_difference,
    pairs_counted,
    same_batches,
    same_tokens,
    sink_growth,
    smoothing_window,
    summary_table,
)
from wakeful.config.schema import config_to_toml
from wakeful.errors import WakefulError
from wakeful.estimates import Estimate, mean_and_error, reach, with_error
from wakeful.pages.charts import Drawing, unchecked
from wakeful.pages.comparison.charts import (
    cost_charts,
    difference_chart,
    followed_charts,
    head_charts,
    relative_loss_chart,
    training_loss_chart,
    with_curves,
)
from wakeful.pages.comparison.fronts import front_charts, rank_chart
from wakeful.pages.page import Step, listed, rough, write_page
from wakeful.variants import build

_MANY = 12
"""Variants: past them those that fare alike share a sentence, and details are folded away."""


def verdicts(comparison: Comparison) -> list[str]:
    """Return what became of sinks that training followed, a sentence for each variant but the
    baseline, or for each outcome where they are many, and those that nothing separates from it."""
    if len(comparison.variants) > _MANY:
        losses = _outcomes(comparison)
    else:
        losses = [_verdict(comparison, variant) for variant in comparison.variants[1:]]
    ranking = ranking_of(comparison)
    same = [] if ranking is None else _inseparable(comparison, ranking)
    return [*_sinks(sink_growth(comparison)), *losses, *same]


def _outcomes(comparison: Comparison) -> list[str]:
    """Say which variants end below the baseline, which above, and of which nothing is sure."""
    said: dict[str, list[tuple[float, str]]] = {"lower": [], "higher": [], "": []}
    for variant in comparison.variants[1:]:
        difference, error = paired_difference(comparison, variant)
        if math.isnan(difference):
            continue
        sure = abs(difference) > reach(error, pairs_counted(comparison, variant))
        way = ("lower" if difference < 0 else "higher") if sure else ""
        figure = f" ({with_error(difference, error, '+')})" if sure else ""
        said[way].append((difference, variant + figure))
    base = comparison.baseline
    begin = {
        "lower": f"A lower loss than {base}, in nats: ",
        "higher": f"A higher loss than {base}: ",
        "": f"No interval separates their loss from that of {base}: ",
    }
    return [f"{begin[way]}{', '.join(name for _, name in sorted(found))}."
            for way, found in said.items() if found]  # fmt: skip


def _inseparable(comparison: Comparison, ranking: Ranking) -> list[str]:
    """Say which variants differ from the baseline in nothing that was measured; costs aside."""
    if len(ranking.seeds) < 2:
        return []
    where = f"of the {ranking.num_columns} ranked figures that are not costs"
    base = comparison.baseline
    if not ranking.inseparable:
        return [f"Each variant differs significantly from {base} in at least one {where}."]
    names = ", ".join(ranking.inseparable)
    return [f"Not significantly different from {base} in any {where}: {names}."]


def _sinks(growth: Sequence[Growth]) -> list[str]:
    """Say where attention on BOS grows, shrinks or does neither surely, and how much there is.

    Nothing where no interval resolves a change, as those of one seed cannot.
    """
    begin = {
        "grows": "A sink grows in",
        "shrinks": "Attention on BOS shrinks in",
        "not resolved": "Whether a sink grows is not resolved in",
    }
    ends: dict[str, list[str]] = {outcome: [] for outcome in begin}
    for each in growth:
        ends[each.outcome].append(f"{each.variant} ({with_error(*each.after)})")
    if not ends["grows"] and not ends["shrinks"]:
        return []
    said = [f"{begin[outcome]} {', '.join(names)}." for outcome, names in ends.items() if names]
    return [" ".join([*said, "In parentheses: attention on BOS at the end."])]


def _verdict(comparison: Comparison, variant: str) -> str:
    baseline = comparison.baseline
    difference, error = paired_difference(comparison, variant)
    side = "below" if difference < 0 else "above"
    if math.isnan(difference):
        return f"{variant} shares no seed with {baseline}."
    if math.isnan(error):
        return (
            f"{variant} ends {abs(difference):.4f} nats {side} {baseline}, with nothing to judge "
            "the error by."
        )
    if abs(difference) <= reach(error, pairs_counted(comparison, variant)):
        told = with_error(difference, error, "+")
        return f"{variant} and {baseline} cannot be distinguished: {told} nats."
    return f"{variant} ends {with_error(abs(difference), error)} nats {side} {baseline}."


def headline(comparison: Comparison) -> str:
    """Return in a sentence how many variants surely end lower or higher than the baseline."""
    base, others = comparison.baseline, comparison.variants[1:]
    if not others:
        loss = summary_table(comparison).row(0, named=True)
        return f"{base} ends at {with_error(loss['loss'], loss['loss_error'])} nats a token."
    counts = {"lower": 0, "higher": 0, "not significantly different": 0}
    others = [variant for variant in others if comparison.pairs(variant)]
    if not others:
        return f"Nothing is compared: no variant has a seed that {base} has."
    for variant in others:
        difference, error = paired_difference(comparison, variant)
        sure = abs(difference) > reach(error, pairs_counted(comparison, variant))
        side = (
            "not significantly different" if not sure else "lower" if difference < 0 else "higher"
        )
        counts[side] += 1
    if len(others) == 1:
        (side,) = (side for side, count in counts.items() if count)
        than = "from" if side == "not significantly different" else "than"
        return f"The validation loss of {others[0]} is {side} {than} that of {base}."
    told = listed(f"{count} {side}" for side, count in counts.items() if count)
    return f"Validation loss compared with {base}: of {len(others)} variants, {told}."


def next_step(comparison: Comparison) -> Step:
    """Return how to look inside the variant that ended lowest."""
    rows = summary_table(comparison).filter(pl.col("difference").is_finite())
    best = rows.sort("difference", maintain_order=True)["variant"][0]
    run = comparison.of(best)[0]
    lowest = ", the lowest" if len(rows) > 1 else ""  # the baseline's row is always there
    return Step(f"look inside {best}{lowest}", f"wakeful diagnose {shlex.quote(str(run.path))}")


def caveat(comparison: Comparison) -> str:
    """Say what the errors cover and what they do not."""
    if len(comparison.variants) < 2:
        return "One variant: nothing to compare."
    rule = "A difference counts when its 95% confidence interval (Student's t) leaves out zero."
    compared = [v for v in comparison.variants[1:] if comparison.pairs(v)]
    if not compared:
        return f"No variant has a seed that {comparison.baseline} has: there are no differences."
    single = [v for v in compared if comparison.paired_over(v) == "windows"]
    if not single:
        return f"Differences are paired over seeds. {rule}"
    whose = "Differences are"
    if len(single) < len(compared):
        these = "Those" if len(single) > 1 else "That"
        verb = "are" if len(single) > 1 else "is"
        whose = f"Differences are paired over seeds. {these} of {listed(single)} {verb}"
    return (
        f"{whose} paired over the validation windows of one seed: they say how sure the "
        f"measurement is, not how much another seed would differ. {rule}"
    )


def notes(comparison: Comparison) -> list[str]:
    """Return what must be said of the figures besides: errors, seeds, runs that are left out."""
    found = [caveat(comparison), seeds_missing(comparison)]
    if comparison.unfinished:
        left = "; ".join(comparison.unfinished)
        found.append(
            f"Not finished and left out: {left}. The command that began them goes on with --resume."
        )
    if lacks_common_seed(comparison):
        found.append("The variants are not ranked: they have no finished seed in common.")
    return [note for note in found if note]


def seeds_missing(comparison: Comparison) -> str:
    """Say which finished seeds of others a variant lacks; "" where all have the same."""
    said = []
    for variant in comparison.variants:
        missing = comparison.missing(variant)
        if missing:
            used = [run.seed for run in comparison.compared(variant)]
            said.append(f"{variant} lacks {_seeds(missing)}; its figures come from {_seeds(used)}.")
    if said:
        said.append("Losses of different seeds cannot be compared; the differences can.")
    return " ".join(said)


def errors_over(comparison: Comparison) -> str:
    """Say what the standard errors of the figures are over."""
    kinds = {comparison.paired_over(variant) for variant in comparison.variants}
    windows = "validation windows, which are the clusters of a ratio estimator"
    if len(kinds) > 1:
        return f"over seeds, and where there is one alone over {windows}"
    return "over seeds" if kinds == {"seeds"} else f"over {windows}"


def _seeds(seeds: list[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}"


def render_terminal(comparison: Comparison) -> RenderableType:
    """Return the verdicts and the summary table, ready to print."""
    several = ["seeds"] if len(comparison.seeds) > 1 else []
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("variant", no_wrap=True)
    for column in (*several, "loss", "difference", "parameters", "B/token", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in summary_table(comparison).iter_rows(named=True):
        difference = with_error(row["difference"], row["difference_error"], "+")
        if row["variant"] == comparison.baseline:
            difference = "baseline"
        elif math.isnan(row["difference"]):  # it shares no seed with the baseline
            difference = "–"
        table.add_row(
            Text(_plain(row["variant"])),
            *([row["seeds_used"]] if several else []),
            with_error(row["loss"], row["loss_error"]),
            difference,
            f"{row['parameters']:,}",
            f"{row['cache_bytes']:,}",
            f"{row['tokens_per_second']:,.0f}",
        )
    lines = [Text(_plain(sentence)) for sentence in verdicts(comparison)]
    dim = [Text(_plain(note), style="dim") for note in notes(comparison)]
    papers: list[str] = []
    run = comparison.runs[0]
    scale = f"at {run.summary.parameters.total:,} parameters and {run.summary.tokens:,} tokens"
    for paper in paper_tables(comparison):
        if paper.outcomes:
            counts = ", ".join(f"{paper.outcomes[name]} {name}" for name in get_args(Outcome))
            said = (f"  {line}" for line in paper.sentences)
            papers += [f"{paper.published.title}: {counts}, {scale}.", *said, ""]
    grown = [
        f"{each.variant}: attention on BOS {with_error(*each.before)} before training, "
        f"{with_error(*each.after)} after: {each.outcome}."
        for each in sink_growth(comparison)
    ]
    more = [_plain(line) for line in [*grown, *([""] if grown else []), *papers]]
    return Group(Text(), *lines, *dim, Text(), table, Text(), *map(Text, more))


def _plain(text: str) -> str:
    """Replace what would steer a terminal: a name may hold anything."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _domains(comparison: Comparison) -> tuple[list[str], list[tuple[str, list[Estimate]]]]:
    """Return the parts of a mixture, and each variant's mean loss on them over seeds.

    Nothing unless every run has them.
    """
    runs = comparison.runs
    whole = all(run.summary.validation.domains for run in runs)
    names = list(runs[0].summary.validation.domains or {}) if whole else []
    rows: list[tuple[str, list[Estimate]]] = []
    for variant in comparison.variants if names else ():
        found = [run.summary.validation.domains or {} for run in comparison.compared(variant)]
        rows.append((variant, [mean_and_error([each[name] for each in found]) for name in names]))
    return names, rows


def _at_reference_speed(comparison: Comparison) -> list[str]:
    """Return a sentence for each way of weighing whose speed is not what a kernel would give it."""
    found: dict[str, list[str]] = {}
    for variant in comparison.variants:
        try:
            note = build("normalizers", comparison.of(variant)[0].config.model.normalizer).note
        except WakefulError:  # of a module that is not imported here
            continue
        if note:
            found.setdefault(note, []).append(variant)
    return [f"{listed(variants)}: {note}." for note, variants in found.items()]


def _speeds(comparison: Comparison) -> dict[str, tuple[str, str]]:
    """Return each variant's median tokens a second over seeds, and the slowest to the fastest."""
    found: dict[str, tuple[str, str]] = {}
    for variant in comparison.variants:
        speeds = sorted(run.summary.tokens_per_second for run in comparison.compared(variant))
        spread = f"{rough(speeds[0])} to {rough(speeds[-1])}" if len(speeds) > 1 else ""
        found[variant] = rough(statistics.median(speeds)), spread
    return found


def _which_curves(comparison: Comparison) -> str:
    """Say which variants are drawn over steps; "" where all are."""
    drawn, others = len(comparison.drawn), len(with_curves(comparison)) - 1
    if others + 1 == drawn:
        return ""
    if others == 0:
        return (
            f"Of {drawn} variants, {comparison.baseline} alone is drawn: none of the others has "
            "finished a seed that it has."
        )
    lowest = "one" if others == 1 else str(others)
    return (
        f"Of {drawn} variants, {comparison.baseline} and the {lowest} of the lowest loss are drawn."
    )


def comparison_figures(comparison: Comparison) -> list[tuple[str, Drawing]]:
    """Return every chart of the page with a title for a paper."""
    window, ranking = smoothing_window(comparison), ranking_of(comparison)
    base = comparison.baseline
    named = [
        (f"Training loss minus that of {base}", relative_loss_chart(comparison, window)),
        (f"Final validation loss minus that of {base}", difference_chart(comparison)),
        ("Training loss", training_loss_chart(comparison, window)),
        *([("Overall rank", rank_chart(comparison, ranking))] if ranking else []),
        *((f"Loss against {title}", chart)
          for title, chart in (front_charts(comparison, ranking) if ranking else [])),
        *followed_charts(comparison),
        *((f"{title}, {variant}", chart)
          for title, charts in head_charts(comparison) for variant, chart in charts),
        *((f"Ratios to {base}: {title}", chart) for title, chart in cost_charts(comparison)),
    ]  # fmt: skip
    return [(title, chart) for title, chart in named if chart is not None]


@unchecked
def write_report(comparison: Comparison, path: str | Path, *, title: str) -> Path:
    """Write the page about a comparison; an old page stays until the new one is whole."""
    window = smoothing_window(comparison)
    firsts = {variant: comparison.of(variant)[0] for variant in comparison.variants}
    ranking = ranking_of(comparison)
    return write_page(
        path,
        "comparison",
        title=title,
        comparison=comparison,
        headlines=[headline(comparison)],
        steps=[next_step(comparison)],
        verdicts=verdicts(comparison),
        notes=notes(comparison),
        errors_over=errors_over(comparison),
        rows=list(summary_table(comparison).iter_rows(named=True)),
        charts={
            "relative": relative_loss_chart(comparison, window),
            "difference": difference_chart(comparison),
            "training": training_loss_chart(comparison, window),
        },
        domains=_domains(comparison),
        papers=paper_tables(comparison),
        ranking=ranking,
        ranks=ranking and rank_chart(comparison, ranking),
        fronts=front_charts(comparison, ranking) if ranking else [],
        followed=followed_charts(comparison),
        heads=head_charts(comparison),
        growth=sink_growth(comparison),
        many=len(comparison.variants) > _MANY,
        curves=_which_curves(comparison),
        under_way=not {*with_curves(comparison)} <= {*comparison.variants},
        speeds=_speeds(comparison),
        costs=cost_charts(comparison),
        slow=_at_reference_speed(comparison),
        window=window,
        first=comparison.runs[0],
        differing=differing_fields(comparison),
        same_batches=same_batches(comparison),
        same_tokens=same_tokens(comparison),
        machines=machines(comparison),
        configs={variant: config_to_toml(run.config) for variant, run in firsts.items()},
        samples={variant: run.summary.samples for variant, run in firsts.items()},
    )
