"""Report of an inheritance."""

import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import altair as alt
import polars as pl

from wakeful.estimates import INTERVAL, format_interval, mean_and_error, round_to_error
from wakeful.inheritance.outcome import (
    BehindCount,
    InheritanceSummary,
    Reference,
    Sizes,
    read_inheritance,
)
from wakeful.layer_ranges import format_layers
from wakeful.reports.charts import PALETTE, Drawing, colors, draw_lines, encode_names, tip, tips
from wakeful.reports.lineage import describe_bridge, describe_objective
from wakeful.reports.terms import explain
from wakeful.reports.value import (
    Cell,
    Chart,
    Facts,
    NextStep,
    Report,
    Section,
    SideBySide,
    Table,
    Text,
    method_section,
    terms,
)
from wakeful.runs.run import Environment

_FIGURES = {
    "angle": "angular distance (of π)",
}
"""Figures that layers are chosen by, and their axis titles."""
_SIZES = (
    ("parameters", "parameters", "{:,.0f}", 1.0),
    ("weight_bytes", "weights, MB", "{:,.1f}", 1e-6),
    ("cache_bytes_per_token", "key/value cache, B a token", "{:,.0f}", 1.0),
    ("cache_bytes", "key/value cache of a whole context, MB", "{:,.2f}", 1e-6),
    ("tokens_per_second", "generation, tokens a second", "", 1.0),
)


def _loss_text(
    summary: InheritanceSummary, value: float, error: float | None, sign: str = ""
) -> str:
    """Return a loss over the validation windows with its 95% interval, from its standard error;
    `sign` "+" writes a plus before positive numbers.
    """
    return format_interval(value, error, _num_windows(summary), sign)


def _num_windows(summary: InheritanceSummary) -> int:
    # The targets, all tokens but the first, divided by the length and rounded up.
    return 1 + (summary.data.validation_tokens - 2) // summary.recipe.train.length


def inheritance_verdicts(summary: InheritanceSummary) -> list[str]:
    """Return the outcome in sentences: parity, the baselines, what it saved."""
    heir, reference = summary.sizes.heir, summary.sizes.reference
    baselines = (
        f"{arm.arm}: {_loss_text(summary, arm.minus_heir, arm.minus_heir_error, '+')} nats against "
        f"{summary.heir.arm}{_how_often(arm.behind)}."
        for arm in summary.arms if not arm.heir
    )  # fmt: skip
    saved = (
        f"It has {heir.parameters / reference.parameters:.1%} of the reference's parameters, "
        f"{heir.cache_bytes_per_token / reference.cache_bytes_per_token:.1%} of its key/value "
        f"cache, and writes {_times_as_fast(summary.sizes)} times as fast."
    )
    return [_parity_sentence(summary), *baselines, saved]


def _reference_cost(reference: Reference) -> str:
    """Return sentences on what the reference's own training cost, which the heir builds on."""
    if reference.tokens is None:
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
    chosen, total = summary.choice, summary.reference.layers
    why = {
        "first": "the first layers, as the paper does",
        "named": "the layers that were named",
        "angle": "all but the neighboring layers over which the stream turns least, ends kept",
    }.get(chosen.rule, chosen.rule)
    return f"{len(chosen.layers)} of {total} layers ({format_layers(chosen.layers)}): {why}."


def _describe_objective_of_healing(summary: InheritanceSummary) -> str:
    """Say in words what heirs and baselines are trained on while healing."""
    heal = summary.recipe.heal
    if heal.by == "text":
        return "heirs learn from the text alone, by cross-entropy"
    return (
        f"heirs learn from the reference's predictions, "
        f"{describe_objective(heal, 'reference', 'heir')}; baselines by cross-entropy"
    )


def _parity_sentence(summary: InheritanceSummary) -> str:
    """Return a sentence on the heir's final loss, and how far it is from parity."""
    heir, reference = summary.heir, summary.reference
    rounds = sum(arm.heir for arm in summary.arms)
    grown = ""
    if rounds > 1:  # each round began from the reference, so that their costs add up
        grown = (
            f" ({heir.all_tokens:,} in {heir.all_steps:,} steps over all {rounds} rounds of growth)"
        )
    gap = _loss_text(summary, abs(heir.minus_reference), heir.minus_reference_error)
    result = (
        f"{heir.arm}, {heir.depth} of {reference.layers} layers, ends at "
        f"{_loss_text(summary, heir.loss, heir.standard_error)} nats per token after "
        f"{heir.tokens:,} tokens{grown}; {reference.name} itself has "
        f"{_loss_text(summary, reference.loss, reference.standard_error)} on the same text"
    )
    if heir.parity:
        return f"{result}: parity is reached, {gap} under it."
    return f"{result}: it is {gap} short of parity."


def _how_often(counts: BehindCount | None) -> str:
    """Return in how many evaluations after the first step an arm is behind, as a phrase with a
    comma before it; "" without any.
    """
    if counts is None or counts.evaluations == 0:
        return ""
    behind, count = counts.behind, counts.evaluations
    if behind == 0:
        often = "never behind it"
    elif behind < count:
        often = f"behind it at {behind} of {count} evaluations"
    else:
        often = f"behind it at {f'all {count} evaluations' if count > 1 else 'the only evaluation'}"
    return f", {often} after the first step"


def _times_as_fast(sizes: Sizes) -> str:
    """Return the heir's speed over the reference's, with the interval over rounds, as text."""
    heir, reference = sizes.heir, sizes.reference
    ratio = heir.tokens_per_second / reference.tokens_per_second
    pairs = zip(heir.speeds, reference.speeds, strict=True)
    ratios = [heir_speed / reference_speed for heir_speed, reference_speed in pairs]
    return format_interval(ratio, mean_and_error(ratios)[1], len(ratios))


def parity_headline(summary: InheritanceSummary) -> str:
    """Return whether the heir reached parity, in a sentence."""
    heir, reference = summary.heir, summary.reference
    gap = _loss_text(summary, abs(heir.minus_reference), heir.minus_reference_error)
    depth = f"{heir.depth} of {reference.layers} layers"
    if heir.parity:
        return f"{heir.arm} reaches parity with {reference.name} with {depth}."
    return f"{heir.arm}, with {depth}, is {gap} nats short of {reference.name}."


def inheritance_report(path: str | Path) -> Report:
    """Return the report of an inheritance's folder: how near its heirs, which were made of layers
    of a reference model and trained, come to that model, and what they save.
    """
    summary, environment = read_inheritance(path)
    reference, heir, recipe = summary.reference, summary.heir, summary.recipe
    choice = _choice_text(summary)
    if heir.layers != summary.choice.layers:
        choice += f" The last heir has the layers {format_layers(heir.layers)}."
    baseline_hint = ""
    if "reference" not in recipe.baselines:
        baseline_hint = (
            " The baseline reference, which trains the whole model on the same tokens, would tell "
            "whether it does."
        )
    choice_charts = _choice_charts(summary)
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
                (arm.arm, arm.summary + (f"; runs {', '.join(arm.runs)}" if arm.runs[1:] else ""))
                for arm in summary.arms
            ]),
        ]),
        *_part_section(summary),
        *_seed_section(summary),
        Section("Depth", [
            Text(choice),
            *(Text(describe_bridge(bridge, recipe.bridge)) for bridge in summary.choice.bridges),
            *([Text("The figures before the choice, of the reference on the training text.",
                    "note"), SideBySide(choice_charts)] if choice_charts else []),
        ]),
        Section("What it saved", [
            Table(["measured here", reference.name, heir.arm, "ratio"],
                  [_size_row(summary.sizes, *size) for size in _SIZES], "What the heir saves"),
            Text("Weights and caches are the bytes of live tensors; the cache holds "
                 f"{summary.sizes.heir.context:,} tokens of one sequence.", "note"),
        ]),
        method_section(_method_entries(summary, environment)),
    ]  # fmt: skip
    look = shlex.quote(str(Path(path) / heir.runs[-1]))
    steps = [NextStep(f"look inside {heir.arm}", f"wakeful diagnose {look}")]
    return Report(f"Inherited from {reference.name}", [parity_headline(summary)], steps, sections)


def _final_table(summary: InheritanceSummary) -> Table:
    """Return the final loss, differences, size and tokens of the reference and each model."""
    reference, heir = summary.reference, summary.heir
    parameters = f"{summary.sizes.reference.parameters / 1e6:.1f} M"
    rows: list[list[Cell | str]] = [
        [reference.name, str(reference.layers), "–",
         _loss_text(summary, reference.loss, reference.standard_error), "–", "–", parameters,
         "not trained here", "–"],
    ]  # fmt: skip
    for arm in summary.arms:
        start = arm.curve[0].standard_error if arm.curve else None
        minus_heir = "–"
        if arm.arm != heir.arm:
            minus_heir = _loss_text(summary, arm.minus_heir, arm.minus_heir_error, "+")
        rows.append([
            Cell(arm.arm, "parity" if arm.parity else ""),
            str(arm.depth),
            _loss_text(summary, arm.start_loss, start),
            _loss_text(summary, arm.loss, arm.standard_error),
            _loss_text(summary, arm.minus_reference, arm.minus_reference_error, "+"),
            minus_heir,
            f"{arm.parameters / 1e6:.1f} M",
            f"{arm.tokens:,}",
            f"{arm.seconds:.0f}",
        ])  # fmt: skip
    columns = ["model", "layers", "at step 0", "validation loss", "minus reference",
               f"minus {heir.arm}", "parameters", "tokens", "seconds"]  # fmt: skip
    return Table(columns, rows, "Final figures of each model", marks=_marks(summary))


def _marks(summary: InheritanceSummary) -> list[tuple[str, str]]:
    """Return no mark for the reference, and each arm's color."""
    return [("", ""), *((color, "circle") for color in colors(summary.arms))]


def _part_section(summary: InheritanceSummary) -> Iterator[Section]:
    """Yield the section on losses on each part of the text, if that is a mixture."""
    reference = summary.reference
    if not reference.parts:
        return
    reference_losses = [
        format_interval(part.loss, part.standard_error, part.windows) for part in reference.parts
    ]
    rows = [[reference.name, *reference_losses], *(
        [arm.arm, *(
            Cell(
                format_interval(part.loss, part.standard_error, part.windows),
                under=[format_interval(
                    part.minus_reference, part.minus_reference_error, part.windows, "+"
                )],
            )
            for part in arm.parts
        )] for arm in summary.arms
    )]  # fmt: skip
    yield Section("Loss by part", [
        Table(["model", *(part.part for part in reference.parts)], rows,
              "Validation loss on each part of the mixture", marks=_marks(summary)),
        Text("Nats per token over the held-out text of each part of the mixture; below it, minus "
             f"{reference.name}’s, paired by window. The loss above is over all of it together.",
             "note"),
    ])  # fmt: skip


def _seed_section(summary: InheritanceSummary) -> Iterator[Section]:
    """Yield the section on mean losses over seeds, if there are several."""
    if not summary.over_seeds:
        return
    rows = [
        [line.arm, format_interval(line.loss, line.standard_error, len(line.losses)),
         format_interval(line.minus_reference, line.standard_error, len(line.losses), "+"),
         format_interval(line.minus_heir, line.minus_heir_error, len(line.losses), "+"),
         " ".join(round_to_error(loss, line.standard_error) for loss in line.losses)]
        for line in summary.over_seeds
    ]  # fmt: skip
    seeds = ", ".join(map(str, summary.recipe.seeds))
    columns = ["model", "validation loss", "minus reference", "minus heir", "each seed"]
    yield Section("Over seeds", [
        Text(f"Every model trained with the seeds {seeds}: means ± the {INTERVAL} over seeds, "
             "differences paired. Models that some seeds did not reach, or reached with another "
             "depth or number of steps, are left out. Everything else on this page is from the "
             "first seed."),
        Table(columns, rows, "Final losses over seeds"),
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
    warmup = f"{optimizer.warmup_steps} steps"
    if recipe.warmup:
        warmup = f"{100 * recipe.warmup:g}% of each run’s steps"
    seeds = ", ".join(map(str, recipe.seeds)) or train.seed
    seeds_note = ", which have a table of their own" if summary.over_seeds else ""
    return [
        ("Text", f"{data.text}; {data.train_tokens:,} training tokens, all with the reference's "
                 "tokenizer"),
        ("Validation", f"{data.validation_tokens:,} tokens, fixed, each predicted once in windows "
                       f"of {train.length}; the reference on the same by the same code{dropped}"),
        ("BOS", f"{'before every window' if recipe.data.bos else 'none before a window'}, for heir "
                "and reference; each document ends with the end-of-text token"),
        ("Training", f"{train.steps} steps a round of {train.batch_size} sequences of "
                     f"{train.length} tokens, the same for all; {optimizer.name}, learning rate "
                     f"{optimizer.lr:g} after {warmup}, cosine to {optimizer.final_lr:g}; weight "
                     f"decay {optimizer.weight_decay:g}; {train.dtype}; seed {seeds}"),
        ("Healing", _describe_objective_of_healing(summary)),
        *([("Reference", f"read as our decoder: {reference.agreement}")]
          if reference.agreement else []),
        ("Inherited", f"{recipe.copy} of each block, with embedding, positions, final norm and "
                      f"head; route {recipe.route or 'the reference’s'}, normalizer "
                      f"{recipe.normalizer or 'the reference’s'}"),
        ("Intervals", f"± the {INTERVAL} over validation windows, differences paired; of one seed, "
                      f"so they say nothing of other seeds{seeds_note}"),
        ("Speed", "greedy, one sequence, by turns with the reference, the median of three ± the "
                  "interval over them"),
        ("Machine", f"{environment.computer}; torch {environment.torch}, wakeful "
                    f"{environment.wakeful}"),
    ]  # fmt: skip


def _choice_charts(summary: InheritanceSummary) -> list[Chart]:
    """Return a chart of each figure that layers were chosen by: a bar for each layer."""
    chosen = set(summary.choice.layers)
    return [
        Chart(f"{_FIGURES[name]} of each layer",
              partial(_draw_layer_figure, values, chosen, _FIGURES[name]),
              _FIGURES[name], explain(name))
        for name, values in summary.choice.figures.items()
        if name in _FIGURES
    ]  # fmt: skip


def loss_curves(summary: InheritanceSummary) -> Drawing:
    """Draw validation losses over steps, the reference's as a line across (fig. 5)."""
    names, reference = [arm.arm for arm in summary.arms], summary.reference
    frame = pl.DataFrame([
        {"arm": arm.arm, "run": point.run, "step": point.step, "value": point.loss}
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


def _draw_layer_figure(values: Sequence[float], chosen: set[int], title: str) -> Drawing:
    """Draw a bar for each layer's figure; the bars of `chosen` layers are filled."""
    layers = range(len(values))
    frame = pl.DataFrame(
        {
            "layer": layers,
            "value": [float(value) for value in values],
            "layers": ["kept" if layer in chosen else "left out" for layer in layers],
        }
    )
    names = ["kept", "left out"]
    edge = encode_names(alt.Stroke, "layers", names, [PALETTE[0], PALETTE[7]])
    # Filled or hollow: color alone would not distinguish them for every reader.
    fill = encode_names(alt.Fill, "layers", names, [PALETTE[0], "transparent"])
    axis = alt.Axis(labelAngle=0, values=list(layers[::5]))
    x = alt.X("layer:O", title="layer", axis=axis)
    y = alt.Y("value:Q", title=title)
    chart = alt.Chart(frame).mark_bar(strokeWidth=1.5)
    tooltip = tips(["layer:O", tip("value", ".4~g"), "layers:N"])
    chart = chart.encode(x=x, y=y, fill=fill, stroke=edge, tooltip=tooltip)
    return chart.properties(height=150, width="container")


def _size_row(sizes: Sizes, key: str, title: str, style: str, unit: float) -> list[str]:
    """Return a table row of a size or speed: its title, reference, heir and their ratio.

    `key` is a field of `Footprint`. A size is multiplied by `unit` and formatted by `style`; a
    speed has an interval over rounds instead.
    """
    if key == "tokens_per_second":
        speeds = (format_interval(model.tokens_per_second, mean_and_error(model.speeds)[1],
                                len(model.speeds))
                  for model in (sizes.reference, sizes.heir))  # fmt: skip
        return [title, *speeds, _times_as_fast(sizes)]
    heir, reference = getattr(sizes.heir, key), getattr(sizes.reference, key)
    ratio = f"{heir / reference:.3f}" if reference else "–"
    return [title, style.format(reference * unit), style.format(heir * unit), ratio]
