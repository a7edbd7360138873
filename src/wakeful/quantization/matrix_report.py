"""Several models under several schemes: one matrix of damage, and whether kurtosis predicts it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from wakeful.quantization.damage import (
    GRADES,
    Damage,
    damage_summary,
    describe_prediction,
    grade_damage,
    layer_errors_of_models,
)
from wakeful.quantization.options import QuantizeOptions
from wakeful.quantization.report import (
    PREDICTION_NOTE,
    damage_headline,
    draw_error_over_kurtosis,
    format_megabytes,
    format_number,
    format_scheme_estimates,
    perplexity_with_interval,
    suggest_next_step,
    worst_table,
)
from wakeful.reports.charts import Drawing, marks
from wakeful.reports.value import (
    Cell,
    Chart,
    Fold,
    Legend,
    NextStep,
    Report,
    Section,
    SideBySide,
    Table,
    Text,
    method_section,
    terms,
)


def _draw_scatter(damages: Sequence[Damage], scheme: str) -> Drawing:
    """Draw the layers of all models under a scheme: relative error over input kurtosis, one color
    per model.
    """
    frame = layer_errors_of_models(damages, scheme).select(
        "model", "module", "value", kurtosis="kurtosis_rest"
    )
    names = [damage.measurement.name for damage in damages]
    return draw_error_over_kurtosis(frame, "model", names, height=260)


def matrix_report(
    damages: Sequence[Damage],
    *,
    method: Mapping[str, str] | None = None,
    sources: Sequence[str] = (),
    options: QuantizeOptions | None = None,
    heads_note: str = "",
) -> Report:
    """Return the report of the damage of several models under several schemes.

    Args:
        damages: one measurement per model, all with the same schemes.
        method: rows of the section on how it was measured.
        sources: the models' names as the user gave them, for commands to copy.
        options: the options of the call, which such commands repeat.
        heads_note: a sentence on which models' output heads are quantized.
    """
    names = [damage.measurement.name for damage in damages]
    sources = sources if len(sources) == len(damages) else names
    steps: list[NextStep] = []
    for name, damage, source in zip(names, damages, sources, strict=True):
        step = suggest_next_step(damage, source, options)
        steps.append(replace(step, text=f"{name}: {step.text}"))
    worst = [
        Fold(f"{damage.measurement.name}: {scheme}", [worst_table(damage, scheme)])
        for damage in damages for scheme in damage.schemes
        if damage.schemes[scheme].weights is not None
    ]  # fmt: skip
    charts = [
        Chart(f"Error of layers against the kurtosis of their inputs under {name}",
              partial(_draw_scatter, damages, name), name)
        for name, scheme in damages[0].schemes.items()
        if scheme.weights is not None
    ]  # fmt: skip
    sections = [
        Section("Models and schemes", [
            _damage_table(damages),
            *([Text(heads_note)] if heads_note else []),
            terms([("perplexity", "perplexity"), ("KL", "kl"), ("kurtosis", "kurtosis")]),
            Text("First in each cell the loss increase in nats per token, paired: both models "
                 "read the same tokens. Weights include tensors in full precision. Seconds: to "
                 "quantize, calibration included, and to read the text. Do not compare the losses "
                 "of models with different tokenizers.", "note"),
        ], brief=True),
        Section("Does kurtosis predict the damage?", [
            Text(describe_prediction(damages)),
            Text(f"{PREDICTION_NOTE} Kurtosis is of all tokens but the first.", "note"),
            Legend(names, "shapes"),
            SideBySide(charts),
        ], brief=True),
        Section("Worst layers", worst),
        method_section(method or {}),
    ]  # fmt: skip
    title = f"Quantization of {', '.join(names)}"
    return Report(title, [damage_headline(damage) for damage in damages], steps, sections)


def _damage_table(damages: Sequence[Damage]) -> Table:
    """Return the table of models (rows) by schemes (columns): losses, sizes and seconds."""
    rows: list[list[Cell]] = []
    for damage in damages:
        summary = damage_summary(damage)
        perplexity = perplexity_with_interval(summary, summary["sequences"])
        size = format_megabytes(summary["bytes"])
        first_kurtosis = format_number(summary["kurtosis_first"], "{:,.1f}")
        rest_kurtosis = format_number(summary["kurtosis_rest"], "{:,.1f}")
        row = [Cell(summary["model"], under=[
            f"perplexity {perplexity}, {size}",
            f"kurtosis {first_kurtosis} first, {rest_kurtosis} rest",
        ])]  # fmt: skip
        for figures in summary["schemes"]:
            estimates = format_scheme_estimates(figures, summary["sequences"])
            row.append(Cell(f"{estimates['loss_increase']} nats", under=[
                GRADES[grade_damage(damage, figures["scheme"])],
                f"perplexity {estimates['perplexity']}",
                f"KL {estimates['kl']}",
                f"{format_megabytes(figures['bytes'])}, {figures['bytes_ratio']:.0%}",
                f"{figures['quantize_seconds']:.1f} + {figures['read_seconds']:.1f} s",
            ]))  # fmt: skip
        rows.append(row)
    schemes = list(damages[0].schemes)
    return Table(["model", *schemes], rows, "Damage of each scheme to each model", "paper",
                 marks=marks(damages))  # fmt: skip
