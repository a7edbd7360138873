"""Report of the damage of quantization."""

import copy
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import altair as alt
import polars as pl

from wakeful.config.commands import format_command_line
from wakeful.config.reading import LENGTH, longest_prompt
from wakeful.estimates import (
    INTERVAL,
    format_estimate,
    format_interval,
    format_perplexity,
    interval_half_width,
)
from wakeful.generation import generation_step
from wakeful.paths import free_folder
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
from wakeful.quantization.mixed_report import comparison_sentence, mixed_model_section
from wakeful.quantization.options import QuantizeOptions
from wakeful.quantization.schemes import NAMED, Scheme
from wakeful.quantization.schemes.methods import Gptq
from wakeful.quantization.sensitivity import LayerCost, cost_frame, describe_costs
from wakeful.reports import charts
from wakeful.reports.terms import explain
from wakeful.reports.value import (
    Cell,
    Chart,
    Findings,
    Fold,
    Legend,
    NextStep,
    Part,
    Report,
    Section,
    SideBySide,
    Table,
    Text,
    glossary,
    listed,
    method_section,
    terms,
)

_POSITIONS = ("rest", "first")
_GAUSSIAN = 3.0
"""The kurtosis of a normal distribution."""
_SMALL_GROUP = 32
"""Input channels of a small group of weights."""
_NUM_COSTLIEST = 10
"""Number of layers whose costs are shown; all are in sensitivity.parquet."""
_MAX_LOG_RATIO = 0.05
"""Median |ln| of the ratio of two schemes' errors, below which they are nearly the same."""


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
    """Return a scheme's figures as text, by name: with intervals loss_increase, kl and perplexity,
    and without one increase, that of the perplexity.
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
    """Return a perplexity as text, with its 95% interval: exp of that of the loss.

    `figures` holds perplexity and perplexity_standard_error; where either is None, there is no
    interval.
    """
    value, error = figures["perplexity"], figures["perplexity_standard_error"]
    if value is None or error is None:
        return format_estimate(value)
    # The standard error of a logarithm is the relative one of the number.
    return format_perplexity(math.log(value), error / value, num_sequences)


def _draw_scatter(damage: Damage) -> charts.Drawing:
    """Draw every layer's relative error over the kurtosis of its input, with one color per
    scheme.
    """
    frames = [
        layer_errors(damage, name).select(
            pl.lit(name).alias("scheme"), "module", "value", kurtosis="kurtosis_rest"
        )
        for name in damage.schemes
    ]
    return draw_error_over_kurtosis(pl.concat(frames), "scheme", [*damage.schemes], height=300)


def draw_error_over_kurtosis(
    frame: pl.DataFrame, color_column: str, names: Sequence[str], *, height: int
) -> charts.Drawing:
    """Draw one point per layer: its relative error over the kurtosis of its input.

    `frame` has the columns module, value (the error) and kurtosis; `color_column` is a further one,
    whose values `names` get a color and a shape each.
    """
    x = alt.X(
        "kurtosis:Q",
        title=["kurtosis of the layer's input,", "all but the first token"],
        scale=alt.Scale(type="log", nice=False, padding=8),
        axis=alt.Axis(format="~g", tickCount=5),
    )
    y = _log_axis("relative error", "~p", padding=8)
    # Logarithmic axes show positive numbers only.
    frame = charts.round_digits(frame.filter((pl.col("value") > 0) & (pl.col("kurtosis") > 0)))
    tooltip = [f"{color_column}:N", "module:N", charts.tip("kurtosis", ".4~g"), _ERROR_TOOLTIP]
    return charts.scatter(frame, color_column, names, x, y, tooltip, height=height)


_ERROR_RANGE = (0.001, 1.0)
"""Range of the color scale of relative errors, the same in every map."""


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
        tooltip=["module:N", _ERROR_TOOLTIP],
    )
    return charts.wide(chart, 22 * len(kinds))


def _draw_block_errors(damage: Damage) -> charts.Drawing:
    """Draw one line per scheme over blocks: the root mean square of the relative errors of a
    block's layers, at all tokens but the first.
    """
    root_mean_square = pl.col("value").pow(2).mean().sqrt()
    frames = []
    for name in damage.schemes:
        errors = layer_errors(damage, name, "rest")
        blocks = _aggregate_blocks(errors, "value", root_mean_square)
        frames.append(blocks.with_columns(scheme=pl.lit(name)))
    frame = pl.concat(frames).filter(pl.col("value") > 0)  # which the logarithmic axis can show
    y = _log_axis("relative error of layers", "~p")
    lines = charts.draw_lines(
        frame, "scheme", [*damage.schemes], charts.LAYERS, y,
        ["scheme:N", "layer:Q", _ERROR_TOOLTIP], points=True, outliers=True,
    )  # fmt: skip
    return charts.wide(lines, 240)


def _draw_block_kurtosis(damage: Damage) -> charts.Drawing:
    """Draw the mean kurtosis of layers' inputs over blocks, at the first token and at the rest."""
    # The kurtosis is the same under all schemes: take the one that has the most layers.
    errors = max((layer_errors(damage, name) for name in damage.schemes), key=len)
    frames = []
    for position in _POSITIONS:
        column = f"kurtosis_{position}"
        blocks = _aggregate_blocks(errors, column, pl.col(column).mean())
        frames.append(blocks.with_columns(position=pl.lit(position)))
    frame = pl.concat(frames).filter(pl.col("value") > 0)  # which the logarithmic axis can show
    base = alt.Chart(charts.round_digits(frame)).encode(x=charts.LAYERS)
    y = _log_axis("kurtosis of layers' inputs", "~g")
    dash = charts.encode_names(
        alt.StrokeDash, "position", _POSITIONS, ([1, 0], [4, 3]), legend=alt.Legend()
    )
    line = base.mark_line(strokeWidth=2, color=charts.PALETTE[-1]).encode(y=y, strokeDash=dash)
    tooltip = ["position:N", "layer:Q", charts.tip("value", ".4~g", title="kurtosis")]
    gaussian = charts.line_at("y", _GAUSSIAN, "gaussian", tooltip=alt.value("a Gaussian has 3"))
    return charts.wide(alt.layer(gaussian, line, charts.nearest_points(base, tooltip, y)), 240)


def _aggregate_blocks(errors: pl.DataFrame, column: str, mean: pl.Expr) -> pl.DataFrame:
    """Return one row per block, with an aggregate `mean` of its layers' finite values as `value`.

    `errors` has one row per layer (see `layer_errors`), and `mean` aggregates its `column`.
    """
    finite_rows = errors.drop_nulls("layer").filter(pl.col(column).is_finite())
    return finite_rows.group_by("layer").agg(value=mean).sort("layer")


_ERROR_TOOLTIP = charts.tip("value", ".3~%", title="relative error")


def _log_axis(title: str, number_format: str, **scale: Any) -> alt.Y:
    """Return a logarithmic y axis of the column `value`; `scale` holds options of `alt.Scale`."""
    axis = alt.Axis(format=number_format, tickCount=5)
    return alt.Y("value:Q", title=title, scale=alt.Scale(type="log", **scale), axis=axis)


def damage_headline(damage: Damage) -> str:
    """Return a sentence that lists a model's schemes by the damage that they do."""
    names_by_grade: dict[str, list[str]] = {}
    for finding in damage_findings(damage):  # one for each scheme, by its name
        names_by_grade.setdefault(GRADES[finding.level], []).append(finding.title)
    grades = "; ".join(f"{grade}: {listed(names)}" for grade, names in names_by_grade.items())
    return f"{damage.measurement.name} quantized: {grades}."


_SAVED = "w8a8"
"""A scheme in which every model can be saved that can be saved at all."""
_FEW_OUTLIERS = 6.0
"""Median kurtosis of layers' inputs below which no rotation is suggested; a Gaussian has 3."""


def suggest_next_step(
    damage: Damage, source: str, options: QuantizeOptions | None = None
) -> NextStep:
    """Return the next command to suggest after a measurement, with the reason for it.

    That is saving the smallest harmless model, measuring more, or something that may cost less loss
    than the best scheme. `source` is the model's name as the user gave it; the command repeats all
    other `options` of the call.
    """
    level_by_scheme = {finding.title: finding.level for finding in damage_findings(damage)}
    harmless = [name for name, level in level_by_scheme.items() if level == "good"]
    options = options or QuantizeOptions()
    if harmless:
        return _suggest_saving(damage, source, options, harmless)
    if "unsure" in level_by_scheme.values():
        schemes = [scheme.expression for scheme in damage.schemes.values()]
        num_sequences = 4 * len(damage.measurement.counts)  # half as wide an interval
        command = _quantize_command(
            source, options, schemes, keep_sensitivity=True, num_sequences=num_sequences
        )
        return NextStep("the text is too short to tell: measure on more of it", command)
    return _suggest_less_damage(damage, source, options)


def _suggest_saving(
    damage: Damage, source: str, options: QuantizeOptions, harmless: Sequence[str]
) -> NextStep:
    """Return the command that saves the smallest of some `harmless` schemes.

    If none of them can be saved, measuring w8a8 is suggested if that can be and was not measured,
    or else evaluating the full model.
    """
    savable = [name for name in harmless if name in damage.savable]
    if savable:
        best = min(savable, key=lambda name: damage.bytes[name])
        scheme, folder = damage.schemes[best], str(free_folder(f"{source.rstrip('/')}-quantized"))
        # The expression includes the kind of scales.
        command = _quantize_command(source, options, [scheme.expression], save=folder)
        return NextStep("save the smallest harmless scheme", command)
    reason = "no harmless scheme measured here can be saved as compressed-tensors"
    if _SAVED in damage.savable and NAMED[_SAVED] not in damage.schemes.values():
        command = _quantize_command(source, options, [_SAVED], layer_schemes=())
        return NextStep(f"{reason}: measure {_SAVED}, which can", command)
    parts = ["wakeful evaluate", shlex.quote(source), options.text_flags]
    return NextStep(f"{reason}: evaluate the original model", " ".join(filter(None, parts)))


def _suggest_less_damage(damage: Damage, source: str, options: QuantizeOptions) -> NextStep:
    """Return a command that may give less damage than the best scheme: finer schemes or a cure."""
    losses = {name: damage.measurement.loss_increase(name)[0] for name in damage.schemes}
    best = min(losses, key=lambda name: losses[name] if math.isfinite(losses[name]) else math.inf)
    finding = f"{best} costs {'the least loss' if len(losses) > 1 else 'too much loss'}"
    scheme, cure = damage.schemes[best], f"wakeful cure {shlex.quote(source)}"
    kurtosis = layer_errors(damage, best)["kurtosis_rest"].median()
    few_outliers = isinstance(kurtosis, float) and kurtosis < _FEW_OUTLIERS
    reason, finer = _finer_schemes(scheme, few_outliers=few_outliers)
    measured = damage.schemes.values()
    unmeasured = [finer_scheme for finer_scheme in finer if finer_scheme not in measured]
    if unmeasured:
        command = _quantize_command(source, options, map(str, unmeasured))
        return NextStep(f"{finding}{reason}", command)
    if reason:  # finer schemes were measured, or there is none
        command = f"{cure} --for {shlex.quote(scheme.expression)}"
        return NextStep(f"{finding}: let the model be cured for it", command)
    advice = f"{finding}, and rounds activations: rotate their outliers away first"
    return NextStep(advice, f"{cure} --rotate hadamard")


def _finer_schemes(scheme: Scheme, *, few_outliers: bool) -> tuple[str, list[Scheme]]:
    """Return the reason for schemes that may cost less loss than a given one, in words, and these
    schemes.

    The list is empty where a cure may help instead. The reason is empty too where that cure is a
    rotation, which spreads outliers of activations.
    """
    if scheme.weights is None:
        return ": give the cache more bits", [NAMED["kv8"]]
    # Outliers, which a rotation spreads, do less harm in groups and in floating-point formats.
    if any(grid.group or grid.emulated for _, grid in scheme.activations):
        return ", and rounds activations", []
    if scheme.activations and few_outliers:  # as in a rotated model: rotating again is no use
        return ", and its inputs have few outliers: give each token a scale", [NAMED["fine"]]
    if scheme.activations:
        return "", []
    # Only weights are quantized, which no rotation helps: finer rounding and groups do.
    finer = [] if scheme.method else [Scheme(weights=scheme.weights, method=Gptq())]
    if not 0 < scheme.weights.group <= _SMALL_GROUP and scheme.weights.per == "channel":
        small_groups = copy.copy(scheme.weights)
        small_groups.group = _SMALL_GROUP
        finer.append(Scheme(weights=small_groups, method=Gptq()))
    if not finer:
        return ", with a method and small groups already: use more bits", [NAMED["fine"]]
    return " and rounds only weights: GPTQ or smaller groups may help", finer


def _quantize_command(
    source: str, options: QuantizeOptions, schemes: Iterable[str], *,
    keep_sensitivity: bool = False, **changes: Any,
) -> str:  # fmt: skip
    """Return the `wakeful quantize` command with these schemes and all other options of a call.

    --save is left out and, unless `keep_sensitivity`, --sensitivity; `changes` replace options.
    """
    # In double quotes, an expression stays readable in a shell's single ones.
    expressions = tuple(dict.fromkeys(expression.replace("'", '"') for expression in schemes))
    # Static scales are part of an expression, so that --scales has its default.
    new_options: dict[str, Any] = {"scheme": expressions, "scales": ("dynamic",), "save": ""}
    if not keep_sensitivity:
        new_options["sensitivity"] = False
    return format_command_line("quantize", replace(options, **(new_options | changes)), source)


def steps_after_saving(
    source: str, folder: str, context: int, *, reading: str = ""
) -> list[NextStep]:
    """Return the commands that serve, evaluate and try out a model that was saved in a folder.

    It is compared with the original, `source`, on the text that the flags `reading` name; the
    prompts for speed and generation are as long as the model's `context` allows. `folder` may also
    be a .gguf file, or a .txt file with flags of llama-quantize, which makes the model from them.
    """
    model, saved = shlex.quote(source), shlex.quote(folder)
    if folder.endswith(".txt"):
        command = f"llama-quantize $(cat {saved}) model-f16.gguf model.gguf Q4_0"
        return [NextStep("give each matrix its type", command)]
    serve = f"llama-server -m {saved}" if folder.endswith(".gguf") else f"vllm serve {saved}"
    evaluate = " ".join(filter(None, ["wakeful evaluate", model, saved, reading]))
    comparison = NextStep("compare it with the original", evaluate)
    prompt = min(512, longest_prompt(context))
    if prompt > 0:  # the context leaves room for one
        comparison = NextStep(
            "compare it with the original, speed included", f"{evaluate} --speed {prompt}"
        )
    return [NextStep("serve it", serve), comparison, generation_step(folder, context)]


def quantization_report(
    damage: Damage,
    *,
    method: Mapping[str, str] | None = None,
    saved: Mapping[str, Any] | None = None,
    source: str = "",
    options: QuantizeOptions | None = None,
    context: int = LENGTH,
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
        context: the model's context length, which bounds the prompts in commands.
        costs: costs of single layers, if they were measured.
        mixed_model: the model with a format for each layer, if formats were chosen.
    """
    summary = damage_summary(damage)
    steps = _next_steps(damage, source or damage.measurement.name, options, context, saved,
                        mixed_model)  # fmt: skip
    file_note = ""
    if saved and not saved["folder"].endswith(".txt"):
        share = saved["bytes"] / summary["bytes"]
        size = format_megabytes(saved["bytes"])
        file_note = f"; the saved file has {size}, {share:.3f} of full precision"
    headlines = [damage_headline(damage)]
    sections = [_grade_section(damage), _damage_section(damage, summary, file_note)]
    if mixed_model is not None:
        headlines.insert(0, comparison_sentence(damage))
        sections.insert(0, mixed_model_section(damage, mixed_model))
    if costs:
        sections.append(_cost_section(costs, damage))
    parts = [part for name in damage.schemes for part in _scheme_layer_parts(damage, name)]
    sections += [
        _single_layer_section(damage, summary["kurtosis_predicts"]),
        Section("Layer by layer", parts),
        glossary("kl", "relative_error", "kurtosis"),
        method_section(method or {}),
    ]
    title = f"Quantization of {damage.measurement.name}"
    return Report(title, headlines, steps, sections)


def _next_steps(
    damage: Damage,
    source: str,
    options: QuantizeOptions | None,
    context: int,
    saved: Mapping[str, Any] | None,
    mixed_model: MixedModel | None,
) -> list[NextStep]:
    """Return the commands to suggest: those that use the saved model, that save chosen formats, or
    what to do after measuring schemes.
    """
    if saved:
        reading = options.text_flags if options else ""
        return steps_after_saving(source, saved["folder"], context, reading=reading)
    if mixed_model is None:
        return [suggest_next_step(damage, source, options)]
    if options is None:
        return []
    ending = ".gguf" if mixed_model.engine.quantizes_embeddings else ""
    folder = str(free_folder(f"{source.rstrip('/')}-quantized{ending}"))
    command = format_command_line("quantize", replace(options, save=folder), source)
    return [NextStep("save it", command)]


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
             f"in full precision{file_note}. Seconds: to quantize, calibration included, and to "
             "read the text.", "note"),
    ], brief=True)  # fmt: skip


def _single_layer_section(damage: Damage, prediction: str) -> Section:
    """Return the report's section on the error of each layer alone, over its input's kurtosis.

    `prediction` is a sentence on whether kurtosis predicts the error.
    """
    names = [*damage.schemes]
    return Section("Each layer alone", [
        Text("The error of a layer's output when only that layer is quantized and its input is "
             "the full-precision one, and the kurtosis of that input's channels. Where kurtosis "
             "is high, one scale has to serve a few huge channels and many small ones."),
        Text("Of all tokens but the first. Errors are root mean squares and kurtosis means "
             "over the layers of a block; a Gaussian has kurtosis 3. Blocks that stand out are "
             "named.", "note"),
        Legend(names),
        SideBySide([
            Chart("Relative error of each block's layers", partial(_draw_block_errors, damage),
                  "Relative error", explain("relative_error")),
            Chart("Kurtosis of the inputs of each block's layers",
                  partial(_draw_block_kurtosis, damage), "Kurtosis of the inputs",
                  explain("kurtosis")),
        ], wide=True),
        Text("Does error follow kurtosis?", "heading"),
        Text(prediction),
        Text(PREDICTION_NOTE, "note"),
        Legend(names, "shapes"),
        Chart("Error of layers against the kurtosis of their inputs",
              partial(_draw_scatter, damage)),
    ])  # fmt: skip


def _cost_section(costs: Sequence[LayerCost], damage: Damage) -> Section:
    """Return the report's section on the costliest layers: sentences and a table.

    `costs` begins with the costliest layer.
    """
    num_sequences = len(damage.measurement.counts)
    kurtosis = cost_frame(costs, damage)["kurtosis"]
    rows = []
    for cost, layer_kurtosis in zip(costs[:_NUM_COSTLIEST], kurtosis, strict=False):
        rows.append([
            cost.name,
            format_interval(*cost.alone, num_sequences, "+"),
            format_interval(*cost.kl, num_sequences, "+"),
            format_number(layer_kurtosis, "{:.3g}"),
            f"{cost.size:,}",
        ])  # fmt: skip
    columns = ["layer", "alone, nats", "KL", "kurtosis", "bytes"]
    parts: list[Part] = [Text(sentence) for sentence in describe_costs(costs, damage)]
    table = Table(columns, rows, "Costliest layers")
    return Section("What layers cost", [*parts, table], brief=True)


PREDICTION_NOTE = (
    "Predicts: Spearman's rank correlation of 0.5 or more, significantly above zero at the 95% "
    "level, treating layers as independent. The literature disagrees (arXiv 2509.23500)."
)


def _damage_table(damage: Damage, summary: Mapping[str, Any]) -> Table:
    """Return the table with one row per scheme: its damage, errors, size and seconds.

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
            Cell(f"{figures['quantize_seconds']:.1f}", f"+ {figures['read_seconds']:.1f}"),
        ])  # fmt: skip
    perplexity = perplexity_with_interval(summary, summary["sequences"])
    size = format_megabytes(summary["bytes"])
    full_precision = ["full precision", "–", "–", "–", perplexity, "–", "–", size, "–"]
    return Table(
        ["scheme", "damage", "loss, nats per token", "KL, nats", "perplexity", "median layer",
         "worst layer", "weights", "seconds"],
        [full_precision, *rows], "Damage of each scheme",
        marks=[("", ""), *charts.marks(damage.schemes)],
        terminal=("damage", "loss, nats per token", "KL, nats", "worst layer", "weights"),
    )  # fmt: skip


def _scheme_layer_parts(damage: Damage, name: str) -> Iterator[Part]:
    """Yield a scheme's map of layers' errors and its table of worst layers.

    If its errors are nearly those of an earlier scheme, both are in one closed fold.
    """
    if damage.schemes[name].weights is None:
        yield Text(name, "heading")
        yield Text("No layer's weights change.", "note")
        return
    worst = worst_table(damage, name)
    drawing = partial(_draw_error_map, damage, name)
    chart = Chart(f"Relative error of every layer under {name}", drawing)
    errors = layer_errors(damage, name)["value"]
    names = list(damage.schemes)
    for earlier in names[: names.index(name)]:
        earlier_errors = layer_errors(damage, earlier)["value"]
        if len(earlier_errors) != len(errors):  # of other layers
            continue
        log_ratios = (earlier_errors / errors).log().abs()
        # No median, where no error is finite, counts as equal errors.
        if (log_ratios.median() or 0) < _MAX_LOG_RATIO:  # pyright: ignore
            yield Fold(f"{name}: nearly the same errors as {earlier}", [chart, worst])
            return
    yield Text(name, "heading")
    yield chart
    yield Fold(f"Worst layers of {name}", [worst], open=name == names[0])


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
            format_number(row["first"], "{:.2%}"),
            format_number(row["rest"], "{:.2%}"),
            format_number(row["kurtosis_first"], "{:,.1f}"),
            format_number(row["kurtosis_rest"], "{:,.1f}"),
        ])  # fmt: skip
    columns = ["layer", "relative error", "first token", "the rest", "input kurtosis, first",
               "kurtosis, rest"]  # fmt: skip
    return Table(columns, rows, f"Worst layers of {damage.measurement.name} under {name}")


def format_number(value: float | None, style: str, missing: str = "–") -> str:
    """Return a number in a format such as "{:.2%}", with a proper minus; None becomes `missing`."""
    return missing if value is None else style.format(value).replace("-", "−")


def format_megabytes(count: float) -> str:
    """Return a number of bytes as text in MB, with decimals below 100 MB."""
    return ("{:,.0f} MB" if count >= 1e8 else "{:.2f} MB").format(count / 1e6)
