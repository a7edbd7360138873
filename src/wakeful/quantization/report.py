"""Reports of the damage of quantization: of one model, and of several models by several schemes."""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import altair as alt

from wakeful.config.commands import format_command_line
from wakeful.errors import WakefulError
from wakeful.estimates import (
    INTERVAL,
    format_estimate,
    format_interval,
    format_perplexity,
    interval_half_width,
)
from wakeful.paths import free_folder
from wakeful.quantization.compressed import compressed_config
from wakeful.quantization.damage import (
    GRADES,
    HARMLESS,
    SEVERE,
    Damage,
    damage_findings,
    damage_summary,
    grade_damage,
    layer_errors,
    worst_layers,
)
from wakeful.quantization.format_search import MixedModel
from wakeful.quantization.mixed_report import (
    comparison_sentence,
    mixed_model_section,
    peer_sentences,
    steps_to_narrower_types,
)
from wakeful.quantization.options import QuantizeOptions
from wakeful.quantization.schemes import Scheme
from wakeful.quantization.schemes.gptq import Gptq
from wakeful.quantization.sensitivity import LayerCost, describe_costs
from wakeful.reports import charts
from wakeful.reports.value import (
    Cell,
    Chart,
    Findings,
    Fold,
    NextStep,
    Part,
    Report,
    Section,
    Table,
    Text,
    glossary,
    listed,
    method_section,
    terms,
)

_NUM_COSTLIEST = 10
"""Number of layers whose costs are shown; all are in sensitivity.parquet."""
_ERROR_RANGE = (0.001, 1.0)
"""Range of the color scale of relative errors, the same in every map."""


def model_card_rows(damage: Damage, scheme: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield rows of a model card: a label, the original model's figure and the quantized model's.

    The figures are perplexity and MB; by default the scheme is the last one measured.
    """
    summary = damage_summary(damage)
    names = [*damage.schemes]
    figures = summary["schemes"][names.index(scheme or names[-1])]
    num_sequences = summary["sequences"]
    original = perplexity_with_interval(summary, num_sequences)
    quantized = perplexity_with_interval(figures, num_sequences)
    text = f"{num_sequences} windows of a text, {summary['tokens']:,} tokens, {INTERVAL}"
    yield f"perplexity on {text}", original, quantized
    yield "MB", f"{damage.full_bytes / 1e6:,.2f}", f"{figures['bytes'] / 1e6:,.2f}"


def format_scheme_estimates(figures: Mapping[str, Any], num_sequences: int) -> dict[str, str]:
    """Return a scheme's figures as text, by name: loss_increase, kl and perplexity with their 95%
    intervals over `num_sequences` sequences, and increase (of the perplexity) without one.
    """

    def with_interval(name: str, sign: str) -> str:
        return format_interval(
            figures[name], figures[f"{name}_standard_error"], num_sequences, sign
        )

    return {
        "loss_increase": with_interval("loss_increase", "+"),
        "kl": with_interval("kl", ""),
        "perplexity": perplexity_with_interval(figures, num_sequences),
        "increase": format_estimate(figures["increase"], None, "+"),
    }


def perplexity_with_interval(figures: Mapping[str, Any], num_sequences: int) -> str:
    """Return a perplexity as text with its 95% interval: exp of the ends of the loss's interval.

    `figures` holds perplexity and perplexity_standard_error; where either is None, there is no
    interval. It is Student's t over `num_sequences` sequences.
    """
    value, error = figures["perplexity"], figures["perplexity_standard_error"]
    if value is None or error is None:
        return format_estimate(value)
    # The standard error of a logarithm is the relative one of the number.
    return format_perplexity(math.log(value), error / value, num_sequences)


def _draw_error_map(damage: Damage, scheme: str) -> charts.Drawing:
    """Draw a heatmap of every layer's relative error under a scheme: block index by kind of
    layer.
    """
    errors = layer_errors(damage, scheme).drop_nulls("layer")  # without layers outside the blocks
    kinds = errors["kind"].unique(maintain_order=True).to_list()
    chart = charts.heatmap(
        charts.round_digits(errors.select("layer", "kind", "value", "module")),
        alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        alt.Y("kind:N", title=None, sort=kinds),
        "value",
        alt.Legend(title="relative error", format="~p", tickCount=4),
        type="log",
        domain=_ERROR_RANGE,
        tooltip=["module:N", charts.tip("value", ".3~%", title="relative error")],
    )
    return charts.wide(chart, 22 * len(kinds))


def damage_headline(damage: Damage) -> str:
    """Return a sentence that lists a model's schemes by the damage that they do."""
    names_by_grade: dict[str, list[str]] = {}
    for finding in damage_findings(damage):  # one for each scheme, by its name
        names_by_grade.setdefault(GRADES[finding.level], []).append(finding.title)
    grades = "; ".join(f"{grade}: {listed(names)}" for grade, names in names_by_grade.items())
    return f"{damage.measurement.name} quantized: {grades}."


def suggest_next_step(
    damage: Damage, source: str, options: QuantizeOptions | None = None
) -> NextStep:
    """Return the next command to suggest after a measurement, with the reason for it.

    The command saves the smallest harmless model or, if no harmless scheme can be saved, measures
    w8a8. If no scheme is harmless, it measures on more text where that may decide, or tries
    something that may cost less loss than the best scheme.

    `source` is the model's name as the user gave it; a command of quantize repeats all other
    `options` of the call.
    """
    options = options or QuantizeOptions()
    levels = {name: grade_damage(damage, name) for name in damage.schemes}
    harmless = [name for name, level in levels.items() if level == "good"]
    savable = [name for name in harmless if _can_be_saved(damage.schemes[name])]
    if savable:
        best = damage.schemes[min(savable, key=lambda name: damage.bytes[name])]
        folder = str(free_folder(f"{source.rstrip('/')}-quantized"))
        command = _quantize_command(source, options, [best.expression], save=folder)
        return NextStep("save the smallest harmless scheme", command)
    if harmless:
        reason = "no harmless scheme measured here can be saved as compressed-tensors"
        command = _quantize_command(source, options, ["w8a8"])
        return NextStep(f"{reason}: measure w8a8, which can", command)
    if "unsure" in levels.values():
        schemes = [scheme.expression for scheme in damage.schemes.values()]
        num_sequences = 4 * len(damage.measurement.counts)  # half as wide an interval
        command = _quantize_command(source, options, schemes, num_sequences=num_sequences)
        return NextStep("the text is too short to tell: measure on more of it", command)
    return _suggest_less_damage(damage, source, options)


def _can_be_saved(scheme: Scheme) -> bool:
    """Tell whether compressed-tensors can hold a scheme, in a model whose layers it can hold."""
    try:
        compressed_config({scheme: ()})
    except WakefulError:
        return False
    return True


def _suggest_less_damage(damage: Damage, source: str, options: QuantizeOptions) -> NextStep:
    """Return a command that may give less damage than the scheme with the lowest loss: GPTQ for
    weights alone, else a cure.
    """
    losses = {name: damage.measurement.loss_increase(name)[0] for name in damage.schemes}
    # A loss that is not finite, perhaps NaN, is the largest.
    best = min(losses, key=lambda name: losses[name] if math.isfinite(losses[name]) else math.inf)
    finding = f"{best} costs {'the least loss' if len(losses) > 1 else 'too much loss'}"
    scheme, cure = damage.schemes[best], f"wakeful cure {shlex.quote(source)}"
    if scheme.weights is not None and not scheme.activations and scheme.method is None:
        command = _quantize_command(source, options, [str(replace(scheme, method=Gptq()))])
        return NextStep(f"{finding} and rounds only weights: GPTQ may help", command)
    if any(not grid.group and not grid.emulated for _, grid in scheme.activations):
        # Whole numbers with one scale per tensor or token suffer from outliers.
        advice = f"{finding}, and rounds activations: rotate their outliers away first"
        return NextStep(advice, f"{cure} --rotate hadamard")
    command = f"{cure} --for {shlex.quote(scheme.expression)}"
    return NextStep(f"{finding}: let the model be cured for it", command)


def _quantize_command(
    source: str, options: QuantizeOptions, schemes: Iterable[str], **changes: Any
) -> str:
    """Return the `wakeful quantize` command with these schemes and all other options of a call,
    without --save and --sensitivity; `changes` replace options.
    """
    # In double quotes, an expression stays readable in a shell's single ones.
    expressions = tuple(dict.fromkeys(expression.replace("'", '"') for expression in schemes))
    new_options: dict[str, Any] = {"scheme": expressions, "save": "", "sensitivity": False}
    return format_command_line("quantize", replace(options, **(new_options | changes)), source)


def steps_after_saving(source: str, folder: str, *, reading: str = "") -> list[NextStep]:
    """Return two commands for a model saved in `folder`, which may be a .gguf file: one serves it,
    the other compares it with the original, `source`. `reading` holds the flags of the latter that
    name the text.
    """
    model, saved = shlex.quote(source), shlex.quote(folder)
    serve = f"llama-server -m {saved}" if folder.endswith(".gguf") else f"vllm serve {saved}"
    evaluate = " ".join(filter(None, ["wakeful evaluate", model, saved, reading]))
    return [NextStep("serve it", serve), NextStep("compare it with the original", evaluate)]


def quantization_report(
    damage: Damage,
    *,
    method: Mapping[str, str] | None = None,
    saved: Mapping[str, Any] | None = None,
    source: str = "",
    options: QuantizeOptions | None = None,
    costs: Sequence[LayerCost] = (),
    mixed_model: MixedModel | None = None,
) -> Report:
    """Return the report of one model's damage under one or several schemes.

    Args:
        damage: the measurement.
        method: rows of the section on how it was measured.
        saved: the folder of the saved model and its bytes, if it was saved.
        source: the model's name as the user gave it, for commands to copy.
        options: the options of the call, which such commands repeat.
        costs: costs of single layers, if they were measured.
        mixed_model: the model with a format for each layer, if formats were chosen.
    """
    summary = damage_summary(damage)
    steps = _next_steps(damage, source or damage.measurement.name, options, saved, mixed_model)
    file_note = ""
    if saved:
        share = saved["bytes"] / summary["bytes"]
        size = format_megabytes(saved["bytes"])
        file_note = f"; the saved file has {size}, {share:.3f} of full precision"
    headlines = [damage_headline(damage)]
    sections = [_grade_section(damage), _damage_section(damage, summary, file_note)]
    if mixed_model is not None:
        headlines[:0] = [comparison_sentence(damage, mixed_model), *peer_sentences(damage)]
        sections.insert(0, mixed_model_section(damage, mixed_model))
    if costs:
        sections.append(_cost_section(costs, damage))
    sections += [
        _layer_section([damage]),
        glossary("kl", "relative_error", "kurtosis"),
        method_section(method or {}),
    ]
    title = f"Quantization of {damage.measurement.name}"
    return Report(title, headlines, steps, sections)


def matrix_report(
    damages: Sequence[Damage],
    *,
    method: Mapping[str, str] | None = None,
    sources: Sequence[str] = (),
    options: QuantizeOptions | None = None,
) -> Report:
    """Return the report of the damage of several models under several schemes.

    Args:
        damages: one measurement per model, all with the same schemes.
        method: rows of the section on how it was measured.
        sources: the models' names as the user gave them, for commands to copy.
        options: the options of the call, which such commands repeat.
    """
    names = [damage.measurement.name for damage in damages]
    steps: list[NextStep] = []
    for name, damage, source in zip(names, damages, sources or names, strict=True):
        step = suggest_next_step(damage, source, options)
        steps.append(replace(step, text=f"{name}: {step.text}"))
    sections = [
        Section("Models and schemes", [
            _matrix_table(damages),
            terms([("perplexity", "perplexity"), ("KL", "kl")]),
            Text("First in each cell the loss increase in nats per token, paired: both models "
                 "read the same tokens. Weights include tensors in full precision. Do not compare "
                 "the losses of models with different tokenizers.", "note"),
        ], brief=True),
        _layer_section(damages),
        method_section(method or {}),
    ]  # fmt: skip
    title = f"Quantization of {', '.join(names)}"
    return Report(title, [damage_headline(damage) for damage in damages], steps, sections)


def _matrix_table(damages: Sequence[Damage]) -> Table:
    """Return the table of models (rows) by schemes (columns): losses and sizes."""
    rows: list[list[Cell]] = []
    for damage in damages:
        summary = damage_summary(damage)
        perplexity = perplexity_with_interval(summary, summary["sequences"])
        size = format_megabytes(summary["bytes"])
        row = [Cell(summary["model"], under=[f"perplexity {perplexity}, {size}"])]
        for figures in summary["schemes"]:
            estimates = format_scheme_estimates(figures, summary["sequences"])
            row.append(Cell(f"{estimates['loss_increase']} nats", under=[
                GRADES[grade_damage(damage, figures["scheme"])],
                f"perplexity {estimates['perplexity']}",
                f"KL {estimates['kl']}",
                f"{format_megabytes(figures['bytes'])}, {figures['bytes_ratio']:.0%}",
            ]))  # fmt: skip
        rows.append(row)
    schemes = list(damages[0].schemes)
    return Table(["model", *schemes], rows, "Damage of each scheme to each model", "paper",
                 marks=charts.marks(damages))  # fmt: skip


def _next_steps(
    damage: Damage,
    source: str,
    options: QuantizeOptions | None,
    saved: Mapping[str, Any] | None,
    mixed_model: MixedModel | None,
) -> list[NextStep]:
    """Return the commands to suggest. For a saved model, they use it. For a mixed model (a format
    for each layer), one saves it, unless the call's `options` are unknown, and one makes its file
    smaller where a narrower type does. Otherwise it is what to do after measuring schemes.
    """
    narrower = [] if mixed_model is None else steps_to_narrower_types(mixed_model, source)
    if saved:
        reading = options.text_flags if options else ""
        return [*steps_after_saving(source, saved["folder"], reading=reading), *narrower]
    if mixed_model is None:
        return [suggest_next_step(damage, source, options)]
    if options is None:
        return narrower
    ending = ".gguf" if mixed_model.engine.quantizes_embeddings else ""
    folder = str(free_folder(f"{source.rstrip('/')}-quantized{ending}"))
    command = format_command_line("quantize", replace(options, save=folder), source)
    return [NextStep("save it", command), *narrower]


def _grade_section(damage: Damage) -> Section:
    """Return the report's section with one finding per scheme and what the grades mean."""
    return Section("", [
        Findings({"": damage_findings(damage)}, GRADES),
        Text(f"Harmless: the loss rises by at most {HARMLESS} nats per token (perplexity by "
             f"2%). Severe: by {SEVERE} or more (20%). Not resolved: its 95% interval includes "
             f"zero and reaches past {HARMLESS}.", "note"),
    ])  # fmt: skip


def _damage_section(damage: Damage, summary: Mapping[str, Any], file_note: str) -> Section:
    """Return the report's section with the table of all schemes.

    `summary` is the damage's `damage_summary`; `file_note` says how large a saved file is.
    """
    return Section("Before and after", [
        _damage_table(damage, summary),
        terms([("nats and perplexity", "perplexity"), ("KL", "kl"),
               ("median and worst layer", "relative_error")]),
        Text("Loss increases are paired: both models read the same tokens. Weights include tensors "
             f"in full precision{file_note}.", "note"),
    ], brief=True)  # fmt: skip


def _cost_section(costs: Sequence[LayerCost], damage: Damage) -> Section:
    """Return the report's section on the costliest layers: a sentence and a table.

    `costs` begins with the costliest layer.
    """
    num_sequences = len(damage.measurement.counts)
    rows = [
        [
            cost.name,
            format_interval(*cost.alone, num_sequences, "+"),
            format_interval(*cost.kl, num_sequences, "+"),
            f"{cost.size:,}",
        ]
        for cost in costs[:_NUM_COSTLIEST]
    ]
    columns = ["layer", "alone, nats", "KL", "bytes"]
    table = Table(columns, rows, "Costliest layers")
    return Section("What layers cost", [Text(describe_costs(costs, damage)), table], brief=True)


def _damage_table(damage: Damage, summary: Mapping[str, Any]) -> Table:
    """Return the table with one row per scheme: its damage, errors and size.

    `summary` is the damage's `damage_summary`; the first row is the full-precision model's.
    """
    rows: list[Sequence[Cell | str]] = []
    for figures in summary["schemes"]:
        estimates = format_scheme_estimates(figures, summary["sequences"])
        module = figures["worst_layer"]
        rows.append([
            figures["scheme"],
            GRADES[grade_damage(damage, figures["scheme"])],
            estimates["loss_increase"],
            estimates["kl"],
            Cell(estimates["perplexity"], under=[estimates["increase"]]),
            format_number(figures["layer_error_median"], "{:.2%}"),
            Cell(format_number(figures["layer_error_worst"], "{:.2%}"),
                 under=[module.removeprefix("model.")] if module else []),
            Cell(format_megabytes(figures["bytes"]), f"{figures['bytes_ratio']:.0%}"),
        ])  # fmt: skip
    perplexity = perplexity_with_interval(summary, summary["sequences"])
    size = format_megabytes(summary["bytes"])
    full_precision = ["full precision", "–", "–", "–", perplexity, "–", "–", size]
    return Table(
        ["scheme", "damage", "loss, nats per token", "KL, nats", "perplexity", "median layer",
         "worst layer", "weights"],
        [full_precision, *rows], "Damage of each scheme",
        marks=[("", ""), *charts.marks(damage.schemes)],
        terminal=("damage", "loss, nats per token", "KL, nats", "worst layer", "weights"),
    )  # fmt: skip


def _layer_section(damages: Sequence[Damage]) -> Section:
    """Return the report's section on the error of each layer alone: for each model and scheme a map
    of all layers and a closed table of the worst.
    """
    parts: list[Part] = [
        Text("The error of a layer's output when only that layer is quantized and its input is "
             "the full-precision one.", "note")
    ]  # fmt: skip
    for damage in damages:
        for name, scheme in damage.schemes.items():
            if scheme.weights is None:  # the cache alone is quantized
                continue
            model = f" of {damage.measurement.name}" if len(damages) > 1 else ""
            title = f"Relative error of every layer{model} under {name}"
            parts.append(Chart(title, partial(_draw_error_map, damage, name)))
            parts.append(Fold(f"Worst layers{model} under {name}", [worst_table(damage, name)]))
    return Section("Layer by layer", parts)


def worst_table(damage: Damage, name: str) -> Table:
    """Return a table of the layers with the largest errors under a scheme, with their kurtosis."""
    num_sequences = len(damage.measurement.counts)
    rows = []
    for row in worst_layers(damage, name):
        error = row["standard_error"]  # None for a single sequence
        radius = None if error is None else interval_half_width(error, num_sequences)
        rows.append([
            row["module"],
            Cell(format_number(row["value"], "{:.2%}"), format_number(radius, "± {:.2%}", "")),
            format_number(row["kurtosis"], "{:,.1f}"),
        ])  # fmt: skip
    columns = ["layer", "relative error", "kurtosis of its input"]
    return Table(columns, rows, f"Worst layers of {damage.measurement.name} under {name}")


def format_number(value: float | None, style: str, missing: str = "–") -> str:
    """Return a number in a format such as "{:.2%}", with a proper minus; None becomes `missing`."""
    return missing if value is None else style.format(value).replace("-", "−")


def format_megabytes(count: float) -> str:
    """Return a number of bytes as text in MB, with decimals below 100 MB."""
    return ("{:,.0f} MB" if count >= 1e8 else "{:.2f} MB").format(count / 1e6)
