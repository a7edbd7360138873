"""Report of an inheritance."""

import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import altair as alt
import polars as pl

from wakeful.estimates import INTERVAL, format_interval
from wakeful.inheritance.outcome import InheritanceSummary, Reference, read_inheritance
from wakeful.layer_ranges import format_layers
from wakeful.reports.charts import Drawing, colors, draw_lines, tip
from wakeful.reports.lineage import describe_bridge, describe_objective
from wakeful.reports.value import (
    Cell,
    Chart,
    Facts,
    NextStep,
    Report,
    Section,
    Table,
    Text,
    method_section,
    terms,
)
from wakeful.runs.run import Environment


def _loss_text(
    summary: InheritanceSummary, value: float, error: float | None, sign: str = ""
) -> str:
    """Return a loss over the validation windows as text, with its 95% interval, which follows from
    its standard error; `sign` "+" writes a plus before positive numbers.
    """
    return format_interval(value, error, _num_windows(summary), sign)


def _num_windows(summary: InheritanceSummary) -> int:
    # The targets, all tokens but the first, divided by the length and rounded up.
    return 1 + (summary.data.validation_tokens - 2) // summary.recipe.train.length


def inheritance_verdicts(summary: InheritanceSummary) -> list[str]:
    """Return the outcome in sentences: each baseline's loss minus the last heir's, and that heir's
    size as a share of the reference's.
    """
    heir, reference = summary.heir, summary.reference
    baselines = (
        f"{arm.name}: {_loss_text(summary, arm.minus_heir, arm.minus_heir_error, '+')} nats "
        f"against {heir.name}."
        for arm in summary.arms if not arm.heir
    )  # fmt: skip
    saved = (
        f"{heir.name} has {heir.parameters / reference.parameters:.1%} of the reference's "
        f"parameters and {heir.cache_bytes_per_token / reference.cache_bytes_per_token:.1%} of its "
        "key/value cache."
    )
    return [*baselines, saved]


def _reference_cost(reference: Reference) -> str:
    """Return sentences on what the reference's own training cost, which the heir builds on."""
    if reference.tokens is None:  # it was not trained by us
        return (
            f"What training {reference.name} cost is not known: its files do not say. An heir "
            "builds on that cost; a model trained from random does not."
        )
    seconds = reference.seconds or 0.0
    return (
        f"{reference.name} itself was trained on {reference.tokens:,} tokens in "
        f"{seconds:,.0f} s, on which an heir builds and a model trained from random does not."
    )


def _choice_text(summary: InheritanceSummary) -> str:
    """Return the first heir's layers and the rule that chose them, in words."""
    chosen, total = summary.recipe, summary.reference.layers
    why = {
        "first": "the first layers, as the paper does",
        "named": "the layers that were named",
        "angle": "all but the neighboring layers over which the stream turns least, ends kept",
    }.get(chosen.rule, chosen.rule)
    return f"{len(chosen.layers)} of {total} layers ({format_layers(chosen.layers)}): {why}."


def _describe_objective_of_healing(summary: InheritanceSummary) -> str:
    """Return in words from what heirs and baselines learn after layers were left out."""
    heal = summary.recipe.heal
    if heal.by == "text":
        return "heirs learn from the text alone, by cross-entropy"
    return (
        f"heirs learn from the reference's predictions, "
        f"{describe_objective(heal, 'reference', 'heir')}; baselines by cross-entropy"
    )


def parity_sentence(summary: InheritanceSummary) -> str:
    """Return a sentence on the last heir's final loss, and how far it is from the reference's: at
    or under that, parity is reached.
    """
    heir, reference = summary.heir, summary.reference
    rounds = sum(arm.heir for arm in summary.arms)  # each trained one heir
    grown = ""
    if rounds > 1:  # each round began from the reference, so that their costs add up
        grown = (
            f" ({heir.all_tokens:,} in {heir.all_steps:,} steps over all {rounds} rounds of growth)"
        )
    gap = _loss_text(summary, abs(heir.minus_reference), heir.minus_reference_error)
    result = (
        f"{heir.name}, {heir.depth} of {reference.layers} layers, ends at "
        f"{_loss_text(summary, heir.loss, heir.standard_error)} nats per token after "
        f"{heir.tokens:,} tokens{grown}; {reference.name} itself has "
        f"{_loss_text(summary, reference.loss, reference.standard_error)} on the same text"
    )
    if heir.parity:
        return f"{result}: parity is reached, {gap} under it."
    return f"{result}: {heir.name} is {gap} short of parity."


def inheritance_report(path: str | Path) -> Report:
    """Return the report of an inheritance's folder.

    It says how near the heirs, which have some of a reference model's layers and were trained, come
    to that model, and what they save.
    """
    summary, environment = read_inheritance(path)
    reference, heir, recipe = summary.reference, summary.heir, summary.recipe
    choice = _choice_text(summary)
    if heir.layers != recipe.layers:  # it has grown since the first heir
        choice += f" The last heir has the layers {format_layers(heir.layers)}."
    baseline_hint = ""
    if "reference" not in recipe.baselines:
        baseline_hint = (
            " The baseline reference, which trains the whole model on the same tokens, would tell "
            "whether it does."
        )
    sections = [
        Section("Verdict", [
            *map(Text, inheritance_verdicts(summary)),
            Text(_reference_cost(reference), "caveat"),
            Text("The models trained here have read other documents of this text, and "
                 f"{reference.name} as it is may not have: an heir can come near it, or pass it, "
                 f"by knowing the text rather than the language.{baseline_hint}", "caveat"),
            *(Text(f"At its start the heir differs from plain blocks: {text}.", "caveat")
              for text in summary.departures),
        ], brief=True),
        Section("Validation loss", [
            Text("Every evaluation of every model, from before its first step. The broken line is "
                 f"{reference.name} itself, on the same tokens."),
            Chart("Validation loss over training steps", partial(loss_curves, summary)),
        ]),
        Section("At the end", [
            _final_table(summary),
            terms([("validation loss", "validation_loss"), ("parity", "parity")]),
            Facts([
                (arm.name, arm.summary + (f"; runs {', '.join(arm.runs)}" if arm.runs[1:] else ""))
                for arm in summary.arms
            ]),
        ]),
        *_part_section(summary),
        Section("Depth", [
            Text(choice),
            *(Text(describe_bridge(bridge, recipe.bridge)) for bridge in summary.bridges),
        ]),
        method_section(_method_entries(summary, environment)),
    ]  # fmt: skip
    heir_folder = shlex.quote(str(Path(path) / heir.runs[-1]))
    steps = [NextStep(f"look inside {heir.name}", f"wakeful diagnose {heir_folder}")]
    return Report(f"Inherited from {reference.name}", [parity_sentence(summary)], steps, sections)


def _final_table(summary: InheritanceSummary) -> Table:
    """Return the final loss, differences, size and tokens of the reference and of each arm, a model
    trained here; "parity" marks an arm that reached the reference's loss.
    """
    reference, heir = summary.reference, summary.heir
    parameters = f"{reference.parameters / 1e6:.1f} M"
    rows: list[list[Cell | str]] = [
        [reference.name, str(reference.layers), "–",
         _loss_text(summary, reference.loss, reference.standard_error), "–", "–", parameters,
         "not trained here", "–"],
    ]  # fmt: skip
    for arm in summary.arms:
        start_error = arm.curve[0].standard_error if arm.curve else None
        minus_heir = "–"
        if arm.name != heir.name:
            minus_heir = _loss_text(summary, arm.minus_heir, arm.minus_heir_error, "+")
        rows.append([
            Cell(arm.name, "parity" if arm.parity else ""),
            str(arm.depth),
            _loss_text(summary, arm.start_loss, start_error),
            _loss_text(summary, arm.loss, arm.standard_error),
            _loss_text(summary, arm.minus_reference, arm.minus_reference_error, "+"),
            minus_heir,
            f"{arm.parameters / 1e6:.1f} M",
            f"{arm.tokens:,}",
            f"{arm.seconds:.0f}",
        ])  # fmt: skip
    columns = ["model", "layers", "at step 0", "validation loss", "minus reference",
               f"minus {heir.name}", "parameters", "tokens", "seconds"]  # fmt: skip
    return Table(columns, rows, "Final figures of each model", marks=_marks(summary))


def _marks(summary: InheritanceSummary) -> list[tuple[str, str]]:
    """Return no mark for the reference, and each arm's color."""
    return [("", ""), *((color, "circle") for color in colors(summary.arms))]


def _part_section(summary: InheritanceSummary) -> Iterator[Section]:
    """Yield the section on losses on each part of the text, if that is a mixture."""
    reference = summary.reference
    if not reference.parts:  # the text is no mixture
        return
    reference_losses = [
        format_interval(part.loss, part.standard_error, part.windows) for part in reference.parts
    ]
    rows: list[list[Cell | str]] = [[reference.name, *reference_losses]]
    for arm in summary.arms:
        row: list[Cell | str] = [arm.name]
        for part in arm.parts:
            loss = format_interval(part.loss, part.standard_error, part.windows)
            difference = format_interval(
                part.minus_reference, part.minus_reference_error, part.windows, "+"
            )
            row.append(Cell(loss, under=[difference]))
        rows.append(row)
    yield Section("Loss by part", [
        Table(["model", *(part.part for part in reference.parts)], rows,
              "Validation loss on each part of the mixture", marks=_marks(summary)),
        Text("Nats per token over the held-out text of each part of the mixture; below it, minus "
             f"{reference.name}’s, paired by window. The loss above is over all of it together.",
             "note"),
    ])  # fmt: skip


def _method_entries(summary: InheritanceSummary, environment: Environment) -> list[tuple[str, str]]:
    """Return how the models were trained and measured, by topic."""
    recipe, data, reference = summary.recipe, summary.data, summary.reference
    train, optimizer = recipe.train, recipe.optimizer
    dropped = ""
    if data.overlap is not None and data.overlap.documents:
        dropped = (
            f"; {data.overlap.documents} held-out documents ({data.overlap.tokens:,} tokens) "
            "partly occur in the training text and were left out"
        )
    bos = "before every window" if recipe.data.bos else "none before a window"
    warmup = f"{recipe.warmup_steps(train.steps)} steps"
    converted = [("Reference", f"read as our decoder: {reference.agreement}")]
    return [
        ("Text", f"{data.text}; {data.train_tokens:,} training tokens, all with the reference's "
                 "tokenizer"),
        ("Validation", f"{data.validation_tokens:,} tokens, fixed, each predicted once in windows "
                       f"of {train.length}; the reference on the same by the same code{dropped}"),
        ("BOS", f"{bos}, for heir and reference; each document ends with the end-of-text token"),
        ("Training", f"{train.steps} steps a round of {train.batch_size} sequences of "
                     f"{train.length} tokens, the same for all; {optimizer.name}, learning rate "
                     f"{optimizer.lr:g} after {warmup}, cosine to {optimizer.final_lr:g}; weight "
                     f"decay {optimizer.weight_decay:g}; {train.dtype}; seed {train.seed}"),
        ("Healing", _describe_objective_of_healing(summary)),
        *(converted if reference.agreement else []),
        ("Inherited", "all of each block, with embedding, positions, final norm and head; "
                      f"route {recipe.route or 'the reference’s'}, normalizer "
                      f"{recipe.normalizer or 'the reference’s'}"),
        ("Intervals", f"± the {INTERVAL} over validation windows, differences paired; of one seed, "
                      "so they say nothing of other seeds"),
        ("Machine", f"{environment.computer}; torch {environment.torch}, wakeful "
                    f"{environment.wakeful}"),
    ]  # fmt: skip


def loss_curves(summary: InheritanceSummary) -> Drawing:
    """Draw each model's validation loss over steps, and the reference's as a broken line across
    (When Attention Collapses, fig. 5).
    """
    names, reference = [arm.name for arm in summary.arms], summary.reference
    frame = pl.DataFrame([
        {"arm": arm.name, "run": point.run, "step": point.step, "value": point.loss}
        for arm in summary.arms
        for point in arm.curve
    ])  # fmt: skip
    across = alt.Chart(pl.DataFrame({"value": [reference.loss], "name": [reference.name]}))
    rule = across.mark_rule(strokeWidth=1.5, strokeDash=[5, 4]).encode(y=alt.Y("value:Q"))
    label = across.mark_text(align="right", baseline="bottom", dy=-3)
    label = label.encode(y=alt.Y("value:Q"), x=alt.value("width"), text=alt.Text("name:N"))
    chart = draw_lines(
        frame, "arm", names,
        alt.X("step:Q", title="training step", axis=alt.Axis(tickCount=8, tickMinStep=1)),
        alt.Y("value:Q", title="validation loss (nats per token)", scale=alt.Scale(zero=False)),
        ["arm:N", "run:N", "step:Q", tip("value", ".4f")],
        at="step", legend=alt.Legend(symbolType="stroke"), points=True, detail="run:N",
        under=[rule, label],
    )  # fmt: skip
    return chart.properties(height=360, width="container")
