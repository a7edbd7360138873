"""Report of a comparison."""

import math
import shlex
from collections.abc import Iterator
from functools import partial

import polars as pl

from wakeful.config.schema import config_to_toml
from wakeful.estimates import (
    INTERVAL,
    format_interval,
    format_perplexity,
    interval_half_width,
    mean_and_error,
    student_quantile,
)  # fmt: skip
from wakeful.reports.value import (
    Cell,
    Chart,
    Fold,
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


def comparison_verdicts(comparison: ComparedRuns) -> list[str]:
    """Return the verdict: a sentence about the final loss of each variant but the baseline."""
    return [_describe_verdict(comparison, variant) for variant in comparison.variants[1:]]


def _compare_loss(comparison: ComparedRuns, variant: str) -> tuple[float, str, str]:
    """Return (difference, text, side) for a variant's final loss minus the baseline's.

    The text is the difference with its 95% interval. The side is "lower" or "higher" if the
    interval excludes zero, otherwise "".
    """
    difference, error = tables.paired_difference(comparison, variant)
    count = tables.pairs_counted(comparison, variant)
    side = ""
    if abs(difference) > interval_half_width(error, count):
        side = "lower" if difference < 0 else "higher"
    return difference, format_interval(difference, error, count, "+"), side


def _describe_verdict(comparison: ComparedRuns, variant: str) -> str:
    """Return a sentence that compares a variant's final loss with the baseline's.

    It says so if they share no seed, if there is no error to judge the difference by, or if the
    interval of the difference includes zero.
    """
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
    """Return a sentence that says how many variants end with a lower loss than the baseline, how
    many with a higher one, and how many with neither.

    For a single variant it says which of these holds. If there is no variant beside the baseline,
    it gives the baseline's loss.
    """
    base, variants = comparison.baseline, comparison.variants[1:]
    if not variants:
        row = tables.summary_table(comparison).row(0, named=True)
        loss = format_interval(row["loss"], row["loss_error"], row["errors_of"])
        return f"{base} ends at validation loss {loss} nats per token."
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
        preposition = "from" if outcome == undecided else "than"
        return f"The validation loss of {variants[0]} is {outcome} {preposition} that of {base}."
    outcomes = listed(f"{count} {outcome}" for outcome, count in counts.items() if count)
    return f"Validation loss compared with {base}: of {len(variants)} variants, {outcomes}."


def next_diagnosis(comparison: ComparedRuns) -> NextStep:
    """Return the command that diagnoses a run of the variant with the lowest loss: the run with its
    first seed.
    """
    # Variants that share no seed with the baseline have no difference; the baseline has 0.
    rows = tables.summary_table(comparison).filter(pl.col("difference").is_finite())
    best = rows.sort("difference", maintain_order=True)["variant"][0]
    run = comparison.of(best)[0]
    lowest = ", the lowest" if len(rows) > 1 else ""
    return NextStep(f"look inside {best}{lowest}", f"wakeful diagnose {shlex.quote(str(run.path))}")


def caveat(comparison: ComparedRuns) -> str:
    """Return a text for readers of the comparison that says what its errors cover and what not.

    It warns of variants with two seeds, whose intervals are wide, and with one, whose errors say
    nothing about other seeds.
    """
    if len(comparison.variants) < 2:
        return "One variant: nothing to compare."
    explanation = f"± is the {INTERVAL}; a difference counts when it leaves out zero."
    compared = [v for v in comparison.variants[1:] if comparison.pairs(v)]
    if not compared:
        return f"No variant has a seed that {comparison.baseline} has: there are no differences."
    if any(len(comparison.pairs(v)) == 2 for v in compared):
        explanation += (
            f" Of two seeds it reaches {student_quantile(1):.1f} standard errors to either side, "
            f"of three {student_quantile(2):.1f}: train a third seed before you conclude anything."
        )
    one_seed = [v for v in compared if comparison.paired_over(v) == "windows"]
    if not one_seed:
        return f"Differences are paired over seeds. {explanation}"
    which = f" of {listed(one_seed)}" if len(one_seed) < len(compared) else ""
    return (
        f"Differences{which} are paired over the validation windows of one seed: they say how sure "
        f"the measurement is, not how much another seed would differ. {explanation}"
    )


def notes(comparison: ComparedRuns) -> list[str]:
    """Return caveats about the figures: errors and unfinished runs."""
    texts = [caveat(comparison)]
    if comparison.unfinished:
        unfinished = "; ".join(comparison.unfinished)
        texts.append(
            f"Not finished and left out: {unfinished}. The command that began them goes on "
            "with --resume."
        )
    return texts


def errors_over(comparison: ComparedRuns) -> str:
    """Return a phrase that says what the figures' intervals are over: seeds, validation windows, or
    the one for some variants and the other for the rest.
    """
    units = {comparison.paired_over(variant) for variant in comparison.variants}
    windows = "validation windows, which are the clusters of a ratio estimator"
    if len(units) > 1:
        return f"over seeds, and where there is one alone over {windows}"
    return "over seeds" if units == {"seeds"} else f"over {windows}"


def _domain_section(comparison: ComparedRuns) -> Iterator[Section]:
    """Yield the section with each variant's loss on each part (domain) of a mixture of texts; none
    unless every run was trained on one.
    """
    runs = comparison.runs
    if not all(run.summary.validation.domains for run in runs):
        return
    names = list(runs[0].summary.validation.domains or {})
    rows = []
    for variant in comparison.variants:
        losses = [run.summary.validation.domains or {} for run in comparison.compared(variant)]
        means = [mean_and_error([run_losses[name] for run_losses in losses]) for name in names]
        rows.append([variant, *(format_interval(*mean, len(losses)) for mean in means)])
    yield Section("Loss by domain", [
        Table(["variant", *names], rows, "Validation loss on each part of the mixture"),
        Text("Nats per token over the held-out text of each part of the mixture, means over seeds. "
             "The loss above is over all of it together.", "note"),
    ])  # fmt: skip


def comparison_report(comparison: ComparedRuns, *, title: str = "") -> Report:
    """Return the report of a comparison, with the sections that its layouts add."""
    sections = [
        Section("Verdict", [
            *map(Text, comparison_verdicts(comparison)),
            *(Text(note, "caveat") for note in notes(comparison)),
        ], brief=True),
        *_loss_over_steps(comparison),
        _final_section(comparison),
        *_domain_section(comparison),
        *_heads_over_steps(comparison),
        *(section for name in comparison.layouts for section in layout_of(name)(comparison)),
        _run_method(comparison),
    ]  # fmt: skip
    title = title or f"Comparison with {comparison.baseline}"
    return Report(title, [comparison_headline(comparison)], [next_diagnosis(comparison)], sections)


def _loss_over_steps(comparison: ComparedRuns) -> Iterator[Section]:
    """Yield the section with two charts over steps: the training losses, and before it, if it can
    be drawn, these losses minus the baseline's.
    """
    texts = [f"Each point is the mean of {tables.smoothing_window(comparison)} steps."]
    num_drawn, total = len(charts.drawn_variants(comparison)), len(comparison.variants)
    if num_drawn < total:
        texts.append(f"Of {total} variants the {num_drawn} of the lowest loss are drawn.")
    drawn = [Chart("Training loss", partial(charts.training_loss_chart, comparison))]
    relative = Chart(f"Training loss minus that of {comparison.baseline}",
                     partial(charts.relative_loss_chart, comparison))  # fmt: skip
    if relative.drawing is not None:
        drawn.insert(0, relative)
        if len(comparison.seeds) > 1:
            texts.append("Bands are 95% confidence intervals over seeds.")
    yield Section("Training loss", [Text(" ".join(texts), "note"), *drawn])


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
        speedup = row["speed_ratio"]
        rows.append([
            variant,
            *([str(row["seeds_used"])] if several else []),
            format_interval(row["loss"], row["loss_error"], row["errors_of"]),
            difference,
            format_perplexity(row["loss"], row["loss_error"], row["errors_of"]),
            Cell(f"{row['parameters']:,}", _format_ratio(row["parameters_ratio"])),
            Cell(f"{row['cache_bytes']:,}", _format_ratio(row["cache_ratio"])),
            Cell(rough(row["tokens_per_second"]), "" if speedup is None else f"×{speedup:.2g}"),
            f"{row['seconds']:.0f}",
        ])  # fmt: skip
    loss, cache = "validation loss", "KV cache, B/token"
    columns = ["variant", *(["seeds"] if several else []), loss, "difference", "perplexity",
               "parameters", cache, "tokens/s", "seconds"]  # fmt: skip
    return Section("At the end", [
        Table(columns, rows, "Final figures of each variant", terminal=(
            "seeds", loss, "difference", "parameters", cache, "tokens/s")),
        Text(f"Losses in nats per token over the full validation set, ± the {INTERVAL} "
             f"{errors_over(comparison)}. A difference is paired; perplexity, and the interval in "
             "parentheses, are e to the loss. The KV cache holds keys and values of the tokens "
             f"read. Tokens/s is the median run's; ×: ratio to {base}.", "note"),
        Chart(f"Final validation loss minus that of {base}",
              partial(charts.difference_chart, comparison)),
    ], brief=True)  # fmt: skip


def _format_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"×{ratio:.3f}"


def _heads_over_steps(comparison: ComparedRuns) -> Iterator[Section]:
    """Yield the section on figures of heads over steps, a chart each, if training logged any."""
    curves = charts.metric_charts(comparison)
    if not curves:
        return
    bands_note = ", bands 95% confidence intervals over seeds" if len(comparison.seeds) > 1 else ""
    yield Section("Heads over training steps", [
        Text(f"Means over layers and heads{bands_note}. A head that parks on BOS where it has "
             "nothing to do is a sink; one with an emptied value and a large residual norm is a "
             "drain and a peak.", "note"),
        SideBySide(curves, wide=True),
    ], brief=True)  # fmt: skip


def _run_method(comparison: ComparedRuns) -> Section:
    """Return the section that says how the runs were trained and measured, with the configuration
    fields in which variants differ and each variant's whole configuration.
    """
    baseline_run, machines = comparison.of(comparison.baseline)[0], tables.machines(comparison)
    config, validation = baseline_run.config, baseline_run.summary.validation
    train, optimizer, data = config.train, config.optimizer, baseline_run.data
    overlap = ""
    if data.overlap is None:
        overlap = "; held-out documents were not compared with the training text"
    elif data.overlap.documents:
        overlap = (
            f"; {data.overlap.documents} held-out documents, which partly occur in the training "
            "text, are left out of validation"
        )
    entries = [
        ("Text", f"{data.text}; {data.trained} training and {data.validation_tokens:,} validation "
                 f"tokens, vocabulary {data.vocab_size:,}{overlap}"),
        ("Corpus SHA-256", data.corpus_sha256),
        (f"Training of {comparison.baseline}",
         f"{train.steps:,} steps of {train.batch_size} sequences of {train.length} tokens; "
         f"{optimizer.name}, learning rate {optimizer.lr:g} after {optimizer.warmup_steps} steps, "
         f"cosine to {optimizer.final_lr:g}; weight decay {optimizer.weight_decay:g}; "
         f"{train.dtype}"),
        ("Seeds", ", ".join(map(str, comparison.seeds))),
        ("Validation", f"all {validation.num_windows} windows of {train.length} tokens, each token "
                       "predicted once"),
        ("Intervals", f"{INTERVAL} {errors_over(comparison)}; differences are paired"),
        ("Machine", "; ".join(machines)),
    ]  # fmt: skip
    differing: list[Part] = []
    if rows := tables.differing_fields(comparison):
        differing = [
            Text("What differs between the configurations", "heading"),
            Table(["variant", "fields"], rows, "Configuration fields that differ", "words"),
        ]
    configs = [
        Fold(f"Configuration of {name}",
             [Text(config_to_toml(comparison.of(name)[0].config), "code")])
        for name in comparison.variants
    ]  # fmt: skip
    return method_section(entries, *differing, Fold("Configurations", configs))
