"""Several models under several schemes: one matrix of damage, and whether kurtosis predicts it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from wakeful.quantization.damage import GRADES, Damage, damage_summary, grade, over_layers, predicts
from wakeful.quantization.options import QuantizeOptions
from wakeful.quantization.report import (
    PREDICTS,
    damage_headline,
    error_over_kurtosis,
    megabytes,
    next_quantization,
    number,
    perplexity_words,
    with_intervals,
    worst_table,
)
from wakeful.reports.charts import Drawing, marks
from wakeful.reports.value import (
    Cell,
    Chart,
    Fold,
    Legend,
    Report,
    Section,
    SideBySide,
    Table,
    Text,
    method_section,
    terms,
)


def _scatter(damages: Sequence[Damage], scheme: str) -> Drawing:
    """Draw a scheme's layers of all models, error against kurtosis."""
    frame = over_layers(damages, scheme).select(
        "model", "module", "value", kurtosis="kurtosis_rest"
    )
    names = [damage.measurement.name for damage in damages]
    return error_over_kurtosis(frame, "model", names, height=260)


def matrix_report(
    damages: Sequence[Damage],
    *,
    method: Mapping[str, str] | None = None,
    sources: Sequence[str] = (),
    options: QuantizeOptions | None = None,
    heads: str = "",
) -> Report:
    """Return the report of several models under several schemes.

    `sources` are what the models were asked for as, and `options` how, for a command to type;
    `heads` says which models' output heads are quantized.
    """
    names = [result.measurement.name for result in damages]
    named = sources if len(sources) == len(damages) else names
    steps = [
        replace(step, text=f"{damage.measurement.name}: {step.text}")
        for damage, source in zip(damages, named, strict=True)
        for step in [next_quantization(damage, source, options)]
    ]
    worst = [
        Fold(f"{damage.measurement.name}: {scheme}", [worst_table(damage, scheme)])
        for damage in damages for scheme in damage.schemes
        if damage.schemes[scheme].weights is not None
    ]  # fmt: skip
    charts = [
        Chart(f"Error of layers against the kurtosis of their inputs under {name}",
              partial(_scatter, damages, name), name)
        for name, scheme in damages[0].schemes.items()
        if scheme.weights is not None
    ]  # fmt: skip
    sections = [
        Section("Models and schemes", [
            _damage_table(damages),
            *([Text(heads)] if heads else []),
            terms([("perplexity", "perplexity"), ("KL", "kl"), ("kurtosis", "kurtosis")]),
            Text("First in each cell the loss increase in nats per token, paired: both models "
                 "read the same tokens. Weights count what stays in full precision too. Seconds: "
                 "to quantize, calibration included, and to read the text. Losses of models with "
                 "different tokenizers are not to be set against each other.", "note"),
        ], brief=True),
        Section("Does kurtosis predict the damage?", [
            Text(predicts(damages)),
            Text(f"{PREDICTS} Kurtosis is of all tokens but the first.", "note"),
            Legend(names, "shapes"),
            SideBySide(charts),
        ], brief=True),
        Section("Worst layers", worst),
        method_section(method or {}),
    ]  # fmt: skip
    title = f"Quantization of {', '.join(names)}"
    return Report(title, [damage_headline(damage) for damage in damages], steps, sections)


def _damage_table(damages: Sequence[Damage]) -> Table:
    rows: list[list[Cell]] = []
    for damage in damages:
        full = damage_summary(damage)
        before = perplexity_words(full, full["sequences"])
        kurtosis = [number(full[f"kurtosis_{part}"], "{:,.1f}") for part in ("first", "rest")]
        row = [Cell(full["model"], under=[
            f"perplexity {before}, {megabytes(full['bytes'])}",
            f"kurtosis {kurtosis[0]} first, {kurtosis[1]} rest",
        ])]  # fmt: skip
        for figures in full["schemes"]:
            estimates = with_intervals(figures, full["sequences"])
            row.append(Cell(f"{estimates['loss_increase']} nats", under=[
                GRADES[grade(damage, figures["scheme"])],
                f"perplexity {estimates['perplexity']}",
                f"KL {estimates['kl']}",
                f"{megabytes(figures['bytes'])}, {figures['bytes_ratio']:.0%}",
                f"{figures['quantize_seconds']:.1f} + {figures['read_seconds']:.1f} s",
            ]))  # fmt: skip
        rows.append(row)
    schemes = list(damages[0].schemes)
    return Table(["model", *schemes], rows, "Damage of each scheme to each model", "paper",
                 marks=marks(damages))  # fmt: skip
