"""Report of a comparison."""

import math
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import polars as pl

from wakeful.config.schema import config_to_toml
from wakeful.errors import WakefulError
from wakeful.estimates import (
    INTERVAL,
    format_interval,
    format_perplexity,
    interval_half_width,
    mean_and_error,
    round_to_error,
    student_quantile,
)  # fmt: skip
from wakeful.reports.value import (
    Cell,
    Chart,
    Fold,
    Group,
    NextStep,
    Part,
    Report,
    Section,
    SideBySide,
    Table,
    Text,
    listed,
    method_section,
    rough,
)
from wakeful.training import charts, tables
from wakeful.training.compared import ComparedRuns
from wakeful.training.layouts import layout_of
from wakeful.variants import build

_MANY = 12
"""Most variants with a sentence each; of more, equal outcomes share one and details are folded."""


def comparison_verdicts(comparison: ComparedRuns) -> list[str]:
    """Return the verdict: sentences about sinks, if training logged them, and about final losses.

    Each variant but the baseline has a sentence about its loss; of more than `_MANY` variants those
    with the same outcome share one.
    """
    if len(comparison.variants) > _MANY:
        losses = _describe_outcomes(comparison)
    else:
        losses = [_describe_verdict(comparison, variant) for variant in comparison.variants[1:]]
    return [*_sink_sentences(tables.sink_growth(comparison)), *losses]


def _describe_outcomes(comparison: ComparedRuns) -> list[str]:
    """Return sentences that list the variants below the baseline, above it, and not resolved."""
    variants_by_side: dict[str, list[tuple[float, str]]] = {"lower": [], "higher": [], "": []}
    for variant in comparison.variants[1:]:
        difference, interval, side = _compare_loss(comparison, variant)
        figure = f" ({interval})" if side else ""
        if not math.isnan(difference):
            variants_by_side[side].append((difference, variant + figure))
    base = comparison.baseline
    begin = {
        "lower": f"A lower loss than {base}, in nats: ",
        "higher": f"A higher loss than {base}: ",
        "": f"No interval separates their loss from that of {base}: ",
    }
    return [f"{begin[side]}{', '.join(name for _, name in sorted(variants))}."
            for side, variants in variants_by_side.items() if variants]  # fmt: skip


def _compare_loss(comparison: ComparedRuns, variant: str) -> tuple[float, str, str]:
    """Return a variant's final loss minus the baseline's, that as text with the 95% interval, and
    its side: "lower" or "higher" where the interval excludes zero, otherwise "".
    """
    difference, error = tables.paired_difference(comparison, variant)
    count = tables.pairs_counted(comparison, variant)
    side = ""
    if abs(difference) > interval_half_width(error, count):
        side = "lower" if difference < 0 else "higher"
    return difference, format_interval(difference, error, count, "+"), side


def _sink_sentences(growth: Sequence[tables.Growth]) -> list[str]:
    """Return one paragraph on the variants whose attention on BOS grows or shrinks in training.

    It is left out ([]) if no interval resolves a change, as with one seed.
    """
    phrases = {
        "grows": "A sink grows in",
        "shrinks": "Attention on BOS shrinks in",
        "not resolved": "Whether a sink grows is not resolved in",
    }
    variants_by_outcome = {
        outcome: [
            f"{g.variant} ({format_interval(*g.after, g.seeds)})"
            for g in growth
            if g.outcome == outcome
        ]
        for outcome in phrases
    }
    if not variants_by_outcome["grows"] and not variants_by_outcome["shrinks"]:
        return []
    sentences = [
        f"{phrases[outcome]} {', '.join(names)}."
        for outcome, names in variants_by_outcome.items()
        if names
    ]
    return [" ".join([*sentences, "In parentheses: attention on BOS at the end."])]


def _describe_verdict(comparison: ComparedRuns, variant: str) -> str:
    """Return a sentence that compares a variant's final loss with the baseline's."""
    baseline = comparison.baseline
    difference, interval, side = _compare_loss(comparison, variant)
    below_or_above = "below" if difference < 0 else "above"
    if math.isnan(difference):
        return f"{variant} shares no seed with {baseline}."
    if tables.pairs_counted(comparison, variant) < 2:
        return (
            f"{variant} ends {abs(difference):.4f} nats {below_or_above} {baseline}, with nothing "
            "to judge the error by."
        )
    if not side:
        return f"{variant} and {baseline} cannot be distinguished: {interval} nats."
    # "below" and "above" stand for the difference's sign.
    return f"{variant} ends {interval.lstrip('+−')} nats {below_or_above} {baseline}."


def comparison_headline(comparison: ComparedRuns) -> str:
    """Return a sentence with the numbers of variants that end lower or higher than the baseline.

    Of one variant it says which; without any, the baseline's loss.
    """
    base, variants = comparison.baseline, comparison.variants[1:]
    if not variants:
        loss = tables.summary_table(comparison).row(0, named=True)
        ends = format_interval(loss["loss"], loss["loss_error"], loss["errors_of"])
        return f"{base} ends at validation loss {ends} nats per token."
    variants = [variant for variant in variants if comparison.pairs(variant)]
    if not variants:
        return f"Nothing is compared: no variant has a seed that {base} has."
    undecided = "not significantly different"
    counts = {"lower": 0, "higher": 0, undecided: 0}
    for variant in variants:
        _, _, side = _compare_loss(comparison, variant)
        counts[side or undecided] += 1
    if len(variants) == 1:
        (outcome,) = (outcome for outcome, count in counts.items() if count)
        than = "from" if outcome == undecided else "than"
        return f"The validation loss of {variants[0]} is {outcome} {than} that of {base}."
    outcomes = listed(f"{count} {outcome}" for outcome, count in counts.items() if count)
    return f"Validation loss compared with {base}: of {len(variants)} variants, {outcomes}."


def next_diagnosis(comparison: ComparedRuns) -> NextStep:
    """Return the command that diagnoses the variant with the lowest loss, its first seed's run."""
    # Variants that share no seed with the baseline have no difference; the baseline has 0.
    rows = tables.summary_table(comparison).filter(pl.col("difference").is_finite())
    best = rows.sort("difference", maintain_order=True)["variant"][0]
    run = comparison.of(best)[0]
    lowest = ", the lowest" if len(rows) > 1 else ""
    return NextStep(f"look inside {best}{lowest}", f"wakeful diagnose {shlex.quote(str(run.path))}")


def caveat(comparison: ComparedRuns) -> str:
    """Return a sentence on what the errors cover and what they do not."""
    if len(comparison.variants) < 2:
        return "One variant: nothing to compare."
    rule = f"± is the {INTERVAL}; a difference counts when it leaves out zero."
    compared = [v for v in comparison.variants[1:] if comparison.pairs(v)]
    if not compared:
        return f"No variant has a seed that {comparison.baseline} has: there are no differences."
    one_seed = [v for v in compared if comparison.paired_over(v) == "windows"]
    if any(len(comparison.pairs(v)) == 2 for v in compared):
        rule += (
            f" Of two seeds it reaches {student_quantile(1):.1f} standard errors to either side, "
            f"of three {student_quantile(2):.1f}: train a third seed before you conclude anything."
        )
    if not one_seed:
        return f"Differences are paired over seeds. {rule}"
    subject = "Differences are"
    if len(one_seed) < len(compared):
        pronoun, verb = ("Those", "are") if len(one_seed) > 1 else ("That", "is")
        subject = f"Differences are paired over seeds. {pronoun} of {listed(one_seed)} {verb}"
    return (
        f"{subject} paired over the validation windows of one seed: they say how sure the "
        f"measurement is, not how much another seed would differ. {rule}"
    )


def notes(comparison: ComparedRuns) -> list[str]:
    """Return caveats about the figures: errors, missing seeds, unfinished runs."""
    texts = [caveat(comparison), seeds_missing(comparison)]
    if comparison.unfinished:
        unfinished = "; ".join(comparison.unfinished)
        texts.append(
            f"Not finished and left out: {unfinished}. The command that began them goes on "
            "with --resume."
        )
    return [note for note in texts if note]


def seeds_missing(comparison: ComparedRuns) -> str:
    """Return sentences on variants that lack finished seeds of others; "" if none does."""
    sentences = []
    for variant in comparison.variants:
        if missing := comparison.missing(variant):
            used = [run.seed for run in comparison.compared(variant)]
            sentences.append(
                f"{variant} lacks {_seeds(missing)}; its figures come from {_seeds(used)}."
            )
    if sentences:
        sentences.append("Losses of different seeds cannot be compared; the differences can.")
    return " ".join(sentences)


def errors_over(comparison: ComparedRuns) -> str:
    """Return the unit that the figures' intervals are over: seeds or validation windows."""
    kinds = {comparison.paired_over(variant) for variant in comparison.variants}
    windows = "validation windows, which are the clusters of a ratio estimator"
    if len(kinds) > 1:
        return f"over seeds, and where there is one alone over {windows}"
    return "over seeds" if kinds == {"seeds"} else f"over {windows}"


def _seeds(seeds: list[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}"


def _domain_section(comparison: ComparedRuns) -> Iterator[Section]:
    """Yield a table of loss by part of a mixture, if every run has it."""
    runs = comparison.runs
    if not all(run.summary.validation.domains for run in runs):
        return
    names = list(runs[0].summary.validation.domains or {})
    rows = []
    for variant in comparison.variants:
        domains = [run.summary.validation.domains or {} for run in comparison.compared(variant)]
        means = [mean_and_error([part[name] for part in domains]) for name in names]
        rows.append([variant, *(format_interval(*mean, len(domains)) for mean in means)])
    yield Section("Loss by domain", [
        Table(["variant", *names], rows, "Validation loss on each part of the mixture"),
        Text("Nats per token over the held-out text of each part of the mixture, means over seeds. "
             "The loss above is over all of it together.", "note"),
    ])  # fmt: skip


def _speed_notes(comparison: ComparedRuns) -> list[str]:
    """Return the normalizers' notes on why they are slow, such as having no kernel of their own,
    each after the variants that it is about.
    """
    variants_by_note: dict[str, list[str]] = {}
    for variant in comparison.variants:
        try:
            note = build("normalizers", comparison.of(variant)[0].config.model.normalizer).note
        except WakefulError:  # a user's own normalizer, whose module a report does not import
            continue
        if note:
            variants_by_note.setdefault(note, []).append(variant)
    return [f"{listed(variants)}: {note}." for note, variants in variants_by_note.items()]


def _which_curves(comparison: ComparedRuns) -> str:
    """Return a sentence on which variants' curves are drawn; "" where all are."""
    total, num_drawn = len(comparison.with_curves), len(charts.drawn_variants(comparison))
    if num_drawn == total:
        return ""
    if num_drawn == 1:
        which = "alone is drawn: none of the others has finished a seed that it has."
    else:
        others = "one" if num_drawn == 2 else num_drawn - 1
        which = f"and the {others} of the lowest loss are drawn."
    return f"Of {total} variants, {comparison.baseline} {which}"


def comparison_report(comparison: ComparedRuns, *, title: str = "") -> Report:
    """Return the report of a comparison, with the parts that its layouts add."""
    additions = [layout_of(name).parts(comparison) for name in comparison.layouts]
    unfinished_drawn = {*charts.drawn_variants(comparison)} - {*comparison.variants}
    caveats = [*notes(comparison), *(note for addition in additions for note in addition.notes)]
    if unfinished_drawn and caveats:
        caveats[-1] += (
            " A variant with no finished run is drawn in the training curves as far as it has come."
        )
    sections = [
        Section("Verdict", [
            *map(Text, comparison_verdicts(comparison)),
            *(Text(verdict) for addition in additions for verdict in addition.verdicts),
            *(Text(note, "caveat") for note in caveats),
        ], brief=True),
        *(section for addition in additions for section in addition.first),
        *_loss_over_steps(comparison),
        _final_section(comparison),
        *_domain_section(comparison),
        *_heads_over_steps(comparison),
        *(section for addition in additions for section in addition.last),
        _detail_section(comparison),
        _run_method(comparison, dict(entry for addition in additions for entry in addition.method)),
    ]  # fmt: skip
    title = title or f"Comparison with {comparison.baseline}"
    return Report(title, [comparison_headline(comparison)], [next_diagnosis(comparison)], sections)


def _loss_over_steps(comparison: ComparedRuns) -> Iterator[Section]:
    """Yield the section with the chart of training loss minus the baseline's by step, if there is
    anything to draw.
    """
    chart = Chart(f"Training loss minus that of {comparison.baseline}",
                  partial(charts.relative_loss_chart, comparison))  # fmt: skip
    if chart.drawing is None:
        return
    batches = "Batches differ between the runs: at one step they have not read the same text."
    if tables.same_batches(comparison):
        batches = "Same text in the same order, step for step."
    sentences = [
        batches,
        f"Each point is the mean of {tables.smoothing_window(comparison)} steps, its own and those "
        "before it. Below zero is better.",
        _which_curves(comparison),
        "Bands are 95% confidence intervals over seeds." if len(comparison.seeds) > 1 else "",
    ]
    text = Text(" ".join(filter(None, sentences)))
    yield Section(f"Training loss against {comparison.baseline}", [text, chart])


def _final_section(comparison: ComparedRuns) -> Section:
    """Return the final figures of each variant: loss, difference, size, cache, speed."""
    several, base = len(comparison.seeds) > 1, comparison.baseline
    rows = []
    for row in tables.summary_table(comparison).iter_rows(named=True):
        variant = row["variant"]
        count = tables.pairs_counted(comparison, variant)
        difference = format_interval(row["difference"], row["difference_error"], count, "+")
        if variant == base:
            difference = "baseline"
        elif math.isnan(row["difference"]):  # it shares no seed with the baseline
            difference = "–"
        ratios = [
            run.summary.tokens_per_second / base_run.summary.tokens_per_second
            for run, base_run in comparison.pairs(variant)
            if base_run.summary.tokens_per_second
        ]
        speeds = sorted(run.summary.tokens_per_second for run in comparison.compared(variant))
        spread = [f"{rough(speeds[0])} to {rough(speeds[-1])}"] if len(speeds) > 1 else []
        faster = row["speed_ratio"]
        rows.append([
            variant,
            *([str(row["seeds_used"])] if several else []),
            format_interval(row["loss"], row["loss_error"], row["errors_of"]),
            difference,
            format_perplexity(row["loss"], row["loss_error"], row["errors_of"]),
            Cell(f"{row['parameters']:,}", _format_ratio(row["parameters_ratio"])),
            Cell(f"{row['cache_bytes']:,}", _format_ratio(row["cache_ratio"])),
            Cell(rough(statistics.median(speeds)),
                 "" if faster is None else f"×{_round_to_spread(faster, ratios)}", spread),
            f"{row['seconds']:.0f}",
        ])  # fmt: skip
    loss, cache = "validation loss", "KV cache, B/token"
    columns = ["variant", *(["seeds"] if several else []), loss, "difference", "perplexity",
               "parameters", cache, "tokens/s", "seconds"]  # fmt: skip
    slowest = ", below it the slowest and the fastest" if several else ""
    return Section("At the end", [
        Table(columns, rows, "Final figures of each variant", terminal=(
            "seeds", loss, "difference", "parameters", cache, "tokens/s")),
        Text(f"Losses in nats per token over the full validation set, ± the {INTERVAL} "
             f"{errors_over(comparison)}. A difference is paired; perplexity, and the interval in "
             "parentheses, are e to the loss. The KV cache holds keys and values of the tokens "
             f"read. Tokens/s is the median run's{slowest}; ×: ratio to {base}.", "note"),
        Chart(f"Final validation loss minus that of {base}",
              partial(charts.difference_chart, comparison)),
    ], brief=True)  # fmt: skip


def _format_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"×{ratio:.3f}"


def _round_to_spread(ratio: float, ratios: Sequence[float]) -> str:
    """Return a ratio with as many digits as the standard error of `ratios`, one a seed, allows;
    with two digits where there is no error.
    """
    error = mean_and_error(ratios)[1] if len(ratios) > 1 else 0.0
    return round_to_error(ratio, error) if error > 0 else f"{ratio:.2g}"


def _heads_over_steps(comparison: ComparedRuns) -> Iterator[Section]:
    """Yield the section on figures of heads over steps, if training logged them: each variant's
    attention on BOS before and after, and a chart for each figure.
    """
    curves = charts.metric_charts(comparison)
    if not curves:
        return
    bands_note = ", bands 95% confidence intervals over seeds" if len(comparison.seeds) > 1 else ""
    rows = [
        [growth.variant, format_interval(*growth.before, growth.seeds),
         format_interval(*growth.after, growth.seeds),
         format_interval(*growth.change, growth.seeds, "+"), growth.outcome]
        for growth in tables.sink_growth(comparison)
    ]  # fmt: skip
    curves_note = _which_curves(comparison)
    yield Section("Heads over training steps", [
        Text(f"Means over layers and heads{bands_note}. A head that parks on BOS where it has "
             "nothing to do is a sink; one with an emptied value and a large residual norm is a "
             "drain and a peak.", "note"),
        Table(["variant", "attention on BOS, before", "after", "change", "outcome"], rows,
              "Attention on BOS before and after training"),
        Text("That a sink grows or shrinks is said where the 95% confidence interval (Student's t) "
             "of the change over seeds leaves out zero.", "note"),
        *([Text(curves_note, "note")] if curves_note else []),
        SideBySide(curves, wide=True),
    ], brief=True)  # fmt: skip


def _detail_section(comparison: ComparedRuns) -> Section:
    """Return costs, training losses and sampled texts, in folds."""
    folds: list[Part] = []
    which = [Text(text) for text in [_which_curves(comparison)] if text]
    if costs := charts.cost_charts(comparison):
        speed_notes = [Text(line, "note") for line in _speed_notes(comparison)]
        if len(tables.machines(comparison)) > 1:
            speed_notes.insert(0, Text("The runs were trained on machines that differ (see below): "
                                       "their speeds do not compare."))  # fmt: skip
        title = f"What it costs, as ratios to {comparison.baseline}"
        folds.append(Fold(title, [*speed_notes, SideBySide(costs)]))
    training = Chart("Training loss", partial(charts.training_loss_chart, comparison))
    folds.append(Fold("Training loss of each variant", [*which, training]))
    continuations: list[Part] = []
    # Those of each variant's first seed.
    samples_by_variant = {v: comparison.of(v)[0].summary.samples for v in comparison.variants}
    for number, prompt in enumerate(comparison.runs[0].summary.samples):
        continuations.append(Text(f"after “{prompt.prompt}”", "heading"))
        continuations.append(SideBySide([
            Group([Text(name, "note"), Text(samples[number].prompt + samples[number].text, "code")])
            for name, samples in samples_by_variant.items() if number < len(samples)
        ]))  # fmt: skip
    folds.append(Fold("Continuations by each variant", continuations))
    return Section("Details", folds)


def _run_method(comparison: ComparedRuns, extra_entries: Mapping[str, str]) -> Section:
    """Return how the runs were trained and measured; `extra_entries` are the layouts'."""
    first, places = comparison.of(comparison.baseline)[0], tables.machines(comparison)
    data, config, validation = first.data, first.config, first.summary.validation
    train, optimizer, sample = config.train, config.optimizer, config.sample
    dropped, several = data.overlap, len(places) > 1
    overlap = ""
    if dropped is None:
        overlap = "; held-out documents were not compared with the training text"
    elif dropped.documents:
        overlap = (
            f"; {dropped.documents} held-out documents, which partly occur in the training text, "
            "are left out of validation"
        )
    crosses = "crosses" if config.data.cross_documents else "does not cross"
    bos = "none before a window, in training and validation"
    if config.data.bos:
        bos = "before every window, in training and validation"
    elif not data.train_tokens:
        bos = "every window begins with it"
    document_ends = "; each document ends with the end-of-text token" if data.train_tokens else ""
    likeliest = f", among the {sample.top_k} likeliest" if sample.top_k else ""
    seeds = ", ".join(map(str, sorted({run.seed for run in comparison.runs})))
    parts = {field.partition(".")[0] for field, _ in tables.differing_fields(comparison)}
    configuration_of = []
    if parts - {"model"}:
        configuration_of = [
            ("Configuration", f"of {comparison.baseline}; what differs is listed below")
        ]
    entries = [
        *configuration_of,
        ("Text", f"{data.text}; {data.trained} training and {data.validation_tokens:,} validation "
                 f"tokens, vocabulary {data.vocab_size:,}{overlap}; attention {crosses} from a "
                 "document into the next of its sequence"),
        ("Corpus SHA-256", data.corpus_sha256),
        ("Training", f"{train.steps:,} steps of {train.batch_size} sequences of {train.length} "
                     f"tokens; {optimizer.name}, learning rate {optimizer.lr:g} after "
                     f"{optimizer.warmup_steps} steps, cosine to {optimizer.final_lr:g}; weight "
                     f"decay {optimizer.weight_decay:g}; {train.dtype}"),
        ("Seeds", f"{seeds}; a seed sets the initial weights, equal wherever names and shapes "
                  "agree, and the data order"),
        ("Validation", f"all {validation.num_windows} windows of {train.length} tokens, side by "
                       "side, each token predicted once"),
        ("BOS", f"{bos}{document_ends}"),
        *extra_entries.items(),
        ("Continuations", f"{sample.num_tokens} tokens at temperature {sample.temperature:g}"
                          f"{likeliest}, seed {sample.seed}"),
        ("Intervals", f"{INTERVAL} {errors_over(comparison)}; differences are paired"),
        ("Smoothing", f"trailing mean of {tables.smoothing_window(comparison)} steps; a loss that "
                      "is not a number is left out"),
        ("Machines" if several else "Machine", "; ".join(places)),
    ]  # fmt: skip
    return method_section(entries, *_configurations(comparison))


def _configurations(comparison: ComparedRuns) -> Iterator[Part]:
    """Yield a table of the fields in which the configurations differ, and each configuration.

    The table has a row per field, or per variant where there are too many for columns.
    """
    many, variants = len(comparison.variants) > _MANY, comparison.variants
    differing = tables.differing_fields(comparison)
    if differing:
        yield Text("What differs between the configurations", "heading")
        label = "Configuration fields that differ"
        if many:
            rows = []
            for number, variant in enumerate(variants):
                is_baseline = number == 0
                fields = [
                    f"{field} = {values[number]}"
                    for field, values in differing
                    if is_baseline or values[number] != values[0]
                ]
                rows.append([variant, "; ".join(fields)])
            yield Table(["variant", "fields"], rows, label, "words")
            yield Text(f"Of {comparison.baseline} every field in which any differs, of the others "
                       "those in which they differ from it.", "note")  # fmt: skip
        else:
            rows = [[field, *values] for field, values in differing]
            yield Table(["field", *variants], rows, label, "words")
    configs = [
        Fold(f"Configuration of {name}",
             [Text(config_to_toml(comparison.of(name)[0].config), "code")])
        for name in variants
    ]  # fmt: skip
    yield from [Fold("Configurations", configs)] if many else configs
