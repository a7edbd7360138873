"""Several models under several schemes: one matrix of damage, and whether kurtosis predicts it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from wakeful.quantization.damage import (
    GRADES,
    Damage,
    damage_summary,
    follows,
    grade,
    over_layers,
    over_models,
    predicts,
)
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
from wakeful.reports.charts import Drawing, marks, tip
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


def correlations(damages: Sequence[Damage]) -> list[dict[str, Any]]:
    """Return Spearman's ρ of each scheme: over all layers, with kurtosis and with max over mean,
    and over models; None where there are fewer than three.
    """
    rows = []
    for name in damages[0].schemes:
        layers = over_layers(damages, name)
        rows.append(
            {
                "scheme": name,
                "layers": len(layers),
                "layers_kurtosis": follows(layers, "kurtosis_rest"),
                "layers_max_over_mean": follows(layers, "max_over_mean_rest"),
                "models": len(damages),
                "models_kurtosis": follows(over_models(damages, name), "kurtosis_rest"),
            }
        )
    return rows


def _scatter(damages: Sequence[Damage], scheme: str) -> Drawing:
    """Draw a scheme's layers of all models, error against kurtosis."""
    frame = over_layers(damages, scheme).select(
        "model", "module", "value", kurtosis="kurtosis_rest", peak="max_over_mean_rest"
    )
    names = [damage.measurement.name for damage in damages]
    peak = tip("peak", ".4~g", title="max / mean")
    return error_over_kurtosis(frame, "model", names, peak, height=260)


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
            _correlation_table(damages),
            Text(f"Spearman's rank correlations. {PREDICTS} Kurtosis and max / mean are of all "
                 "tokens but the first.", "note"),
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


def _correlation_table(damages: Sequence[Damage]) -> Table:
    rows = [
        [row["scheme"], str(row["layers"]), number(row["layers_kurtosis"], "{:+.2f}"),
         number(row["layers_max_over_mean"], "{:+.2f}"), str(row["models"]),
         number(row["models_kurtosis"], "{:+.2f}")]
        for row in correlations(damages)
    ]  # fmt: skip
    columns = ["scheme", "layers", "error and kurtosis", "error and max / mean", "models",
               "loss increase and kurtosis"]  # fmt: skip
    return Table(columns, rows, "Spearman's rank correlations", terminal=())
