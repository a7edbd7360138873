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

from wakeful.config.commands import command_of
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
    grade,
    layer_errors,
    worst_layers,
)
from wakeful.quantization.options import QuantizeOptions
from wakeful.quantization.schemes import NAMED, Scheme
from wakeful.quantization.schemes.methods import Gptq
from wakeful.quantization.sensitivity import LayerCost, cost_frame, cost_sentences
from wakeful.quantization.smallest import Smallest
from wakeful.quantization.smallest_report import proof_words, smallest_section
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
_SMALL = 32
"""Input channels of a small group of weights."""
_DEAREST = 10
"""Layers whose costs are shown; all are in sensitivity.parquet."""
_ALIKE = 0.05
"""Errors of layers that differ by less, in the median, are nearly the same."""


def before_and_after(damage: Damage, scheme: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield a scheme's figures, by default the last one's: a label, and both models' figures."""
    full = damage_summary(damage)
    names = [*damage.schemes]
    figures = full["schemes"][names.index(scheme or names[-1])]
    count = full["sequences"]
    before, after = perplexity_words(full, count), perplexity_words(figures, count)
    text = f"{count} windows of a text, {full['tokens']:,} tokens, {INTERVAL}"
    yield f"perplexity on {text}", before, after
    yield "MB", f"{damage.full_bytes / 1e6:,.2f}", f"{figures['bytes'] / 1e6:,.2f}"


def with_intervals(figures: Mapping[str, Any], count: int) -> dict[str, str]:
    """Return a scheme's estimates over `count` sequences as they are shown."""
    estimates = {
        key: format_interval(figures[key], figures[f"{key}_standard_error"], count, sign)
        for key, sign in (("loss_increase", "+"), ("kl", ""))
    }
    increase = format_estimate(figures["increase"], None, "+")
    return estimates | {"perplexity": perplexity_words(figures, count), "increase": increase}


def perplexity_words(figures: Mapping[str, Any], count: int) -> str:
    """Return a perplexity over `count` sequences, with e to the ends of its loss's interval."""
    value, error = figures["perplexity"], figures["perplexity_standard_error"]
    if value is None or error is None:
        return format_estimate(value)
    return format_perplexity(math.log(value), error / value, count)


def _scatter(damage: Damage) -> charts.Drawing:
    """Draw every layer's relative error against the kurtosis of its input."""
    frames = [
        layer_errors(damage, name).select(
            pl.lit(name).alias("scheme"), "module", "value", kurtosis="kurtosis_rest"
        )
        for name in damage.schemes
    ]
    return error_over_kurtosis(pl.concat(frames), "scheme", [*damage.schemes], height=300)


def error_over_kurtosis(
    frame: pl.DataFrame, of: str, names: Sequence[str], *, height: int
) -> charts.Drawing:
    """Draw a point a layer: its relative error, `value`, over the `kurtosis` of its input.

    `of` is the column whose `names` have a color and a shape each.
    """
    x = alt.X(
        "kurtosis:Q",
        title=["kurtosis of the layer's input,", "all but the first token"],
        scale=alt.Scale(type="log", nice=False, padding=8),
        axis=alt.Axis(format="~g", tickCount=5),
    )
    y = _log("relative error", "~p", padding=8)
    frame = charts.round_digits(frame.filter((pl.col("value") > 0) & (pl.col("kurtosis") > 0)))
    tooltip = [f"{of}:N", "module:N", charts.tip("kurtosis", ".4~g"), _ERROR]
    return charts.scatter(frame, of, names, x, y, tooltip, height=height)


_ERRORS = (0.001, 1.0)
"""The scale of a layer's relative error, in the map of every scheme and model."""


def _layer_map(damage: Damage, scheme: str) -> charts.Drawing:
    """Draw a scheme's relative error of every layer: blocks by kinds of layer."""
    errors = layer_errors(damage, scheme).drop_nulls("layer")
    kinds = errors["kind"].unique(maintain_order=True).to_list()
    chart = charts.heatmap(
        charts.round_digits(errors.select("layer", "kind", "value", "module")),
        alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        alt.Y("kind:N", title=None, sort=kinds),
        "value",
        alt.Legend(title="relative error", format="~p", tickCount=4),
        type="log",
        domain=_ERRORS,
        tooltip=["module:N", _ERROR],
    )
    return charts.wide(chart, 22 * len(kinds))


def _errors(damage: Damage) -> charts.Drawing:
    """Draw one line per scheme: the root mean square of the errors of each block's layers."""
    square = pl.col("value").pow(2).mean().sqrt()
    frames = [
        _over_blocks(layer_errors(damage, name, "rest"), "value", square).with_columns(
            scheme=pl.lit(name)
        )
        for name in damage.schemes
    ]
    frame = pl.concat(frames).filter(pl.col("value") > 0)
    lines = charts.draw_lines(
        frame, "scheme", [*damage.schemes], charts.LAYERS, _log("relative error of layers", "~p"),
        ["scheme:N", "layer:Q", _ERROR], points=True, outliers=True,
    )  # fmt: skip
    return charts.wide(lines, 240)


def _kurtosis(damage: Damage) -> charts.Drawing:
    """Draw the kurtosis of the inputs of each block's layers: a line for the first token and one
    for the rest.
    """
    errors = max((layer_errors(damage, name) for name in damage.schemes), key=len)
    frames = [
        _over_blocks(errors, column, pl.col(column).mean()).with_columns(position=pl.lit(position))
        for position in _POSITIONS
        for column in [f"kurtosis_{position}"]
    ]
    frame = pl.concat(frames).filter(pl.col("value") > 0)
    base = alt.Chart(charts.round_digits(frame)).encode(x=charts.LAYERS)
    y = _log("kurtosis of layers' inputs", "~g")
    dash = charts.encode_names(
        alt.StrokeDash, "position", _POSITIONS, ([1, 0], [4, 3]), legend=alt.Legend()
    )
    line = base.mark_line(strokeWidth=2, color=charts.PALETTE[-1]).encode(y=y, strokeDash=dash)
    tooltip = ["position:N", "layer:Q", charts.tip("value", ".4~g", title="kurtosis")]
    gaussian = charts.line_at("y", _GAUSSIAN, "gaussian", tooltip=alt.value("a Gaussian has 3"))
    return charts.wide(alt.layer(gaussian, line, charts.nearest_points(base, tooltip, y)), 240)


def _over_blocks(errors: pl.DataFrame, column: str, mean: pl.Expr) -> pl.DataFrame:
    """Return one row a block: the mean of a column of its layers."""
    finite_rows = errors.drop_nulls("layer").filter(pl.col(column).is_finite())
    return finite_rows.group_by("layer").agg(value=mean).sort("layer")


_ERROR = charts.tip("value", ".3~%", title="relative error")


def _log(title: str, style: str, **scale: Any) -> alt.Y:
    axis = alt.Axis(format=style, tickCount=5)
    return alt.Y("value:Q", title=title, scale=alt.Scale(type="log", **scale), axis=axis)


def damage_headline(damage: Damage) -> str:
    """Return in a sentence which schemes harm the model, and how much."""
    names_by_grade: dict[str, list[str]] = {}
    for finding in damage_findings(damage):
        names_by_grade.setdefault(GRADES[finding.level], []).append(finding.title)
    grades = "; ".join(f"{level}: {listed(names)}" for level, names in names_by_grade.items())
    return f"{damage.measurement.name} quantized: {grades}."


_SAVED = "w8a8"
"""The scheme that every model is saved by which can be saved at all."""
_FEW_OUTLIERS = 6.0
"""A median kurtosis of layers' inputs below which no rotation is proposed; a Gaussian has 3."""


def next_quantization(
    damage: Damage, source: str, options: QuantizeOptions | None = None
) -> NextStep:
    """Return how to save the smallest harmless model of those that can be, or what may cost less
    than the best scheme.

    `options` are what else was asked for: the command asks for it again.
    """
    levels = {finding.title: finding.level for finding in damage_findings(damage)}
    again = partial(_command, source, options or QuantizeOptions())
    harmless = [name for name, level in levels.items() if level == "good"]
    savable = [name for name in harmless if name in damage.savable]
    if savable:
        best = min(savable, key=lambda name: damage.bytes[name])
        scheme, folder = damage.schemes[best], str(free_folder(f"{source.rstrip('/')}-quantized"))
        command = again([scheme.expression], save=folder)  # static says so
        return NextStep("save the smallest harmless one", command)
    if harmless:
        reason = "no folder holds what is harmless here"
        if _SAVED in damage.savable and NAMED[_SAVED] not in damage.schemes.values():
            reason, command = f"{reason}: measure what one does", again([_SAVED], others=())
        else:
            reason, schemes = (
                f"{reason}: see how good the model is",
                f"wakeful evaluate {shlex.quote(source)}",
            )
            command = " ".join(filter(None, [schemes, options.text_flags if options else ""]))
        return NextStep(reason, command)
    if "unsure" in levels.values():
        schemes = [finding.expression for finding in damage.schemes.values()]
        more = 4 * len(damage.measurement.counts)
        command = again(schemes, costs=True, num_sequences=more)
        return NextStep("too little text to tell: measure on more", command)
    losses = {name: damage.measurement.loss_increase(name)[0] for name in levels}
    best = min(levels, key=lambda name: losses[name] if math.isfinite(losses[name]) else math.inf)
    lead = f"{best} costs {'least' if len(levels) > 1 else 'too much'}"
    scheme, cure = damage.schemes[best], f"wakeful cure {shlex.quote(source)}"
    spread = layer_errors(damage, best)["kurtosis_rest"].median()
    reason, finer = _finer(scheme, few=isinstance(spread, float) and spread < _FEW_OUTLIERS)
    finer = [finding for finding in finer if finding not in damage.schemes.values()]
    if finer:
        return NextStep(f"{lead}{reason}", again(map(str, finer)))
    if reason:
        schemes = f"{cure} --for {shlex.quote(scheme.expression)}"
        return NextStep(f"{lead}: see which cure it wants", schemes)
    advice = f"{lead}, and rounds activations: rotate their outliers away first"
    return NextStep(advice, f"{cure} --rotate hadamard")


def _finer(scheme: Scheme, *, few: bool) -> tuple[str, list[Scheme]]:
    """Return what may cost less than a scheme, in words and as schemes; no schemes where a cure
    may, and no words where that is a rotation.

    A rotation spreads outliers of activations. Where there are `few`, as in a rotated model, scales
    have to be finer; in blocks, which hold outliers to themselves, it may hurt. Where weights alone
    are quantized it does not help: the rounding or the groups have to be finer.
    """
    if scheme.weights is None:
        return ": keep more bits of the cache", [NAMED["kv8"]]
    if any(grid.group or grid.emulated for _, grid in scheme.activations):
        return ", and rounds activations", []
    if scheme.activations:
        advice = ", and its inputs have few outliers: give each token a scale"
        return (advice, [NAMED["fine"]]) if few else ("", [])
    finer = [] if scheme.method else [Scheme(weights=scheme.weights, method=Gptq())]
    if not 0 < scheme.weights.group <= _SMALL and scheme.weights.per == "channel":
        small = copy.copy(scheme.weights)
        small.group = _SMALL
        finer.append(Scheme(weights=small, method=Gptq()))
    if not finer:
        return ", with a method and small groups already: take more bits", [NAMED["fine"]]
    return " and rounds weights alone: GPTQ or smaller groups may help", finer


def _command(
    source: str, options: QuantizeOptions, schemes: Iterable[str], *, costs: bool = False,
    **changes: Any,
) -> str:  # fmt: skip
    """Return the command line that quantizes by schemes and asks for all else again; without
    the `costs` of layers where they are not asked for.
    """
    alone = {} if costs else {"sensitivity": False}
    # In double quotes, an expression stays readable in a shell's single ones.
    expressions = tuple(dict.fromkeys(expression.replace("'", '"') for expression in schemes))
    again = {"scheme": expressions, "scales": ("dynamic",), "save": ""}
    return command_of("quantize", replace(options, **(again | alone | changes)), source)


def after_saving(source: str, folder: str, context: int, *, reading: str = "") -> list[NextStep]:
    """Return what to do with a quantized model in a folder and the model that it was made of.

    Its speed and a text are asked for as far as `context` leaves room. `reading` are the flags by
    which the text was read.
    """
    model, small = shlex.quote(source), shlex.quote(folder)
    if folder.endswith(".txt"):
        command = f"llama-quantize $(cat {small}) model-f16.gguf model.gguf Q4_0"
        return [NextStep("give each matrix its type", command)]
    prompt = min(512, longest_prompt(context))
    serve = f"llama-server -m {small}" if folder.endswith(".gguf") else f"vllm serve {small}"
    comparison, speed = (", speed included", f" --speed {prompt}") if prompt > 0 else ("", "")
    evaluate = " ".join(filter(None, ["wakeful evaluate", model, small, reading]))
    return [
        NextStep("serve it", serve),
        NextStep(f"compare it with the original{comparison}", f"{evaluate}{speed}"),
        generation_step(folder, context),
    ]


def quantization_report(
    damage: Damage,
    *,
    method: Mapping[str, str] | None = None,
    saved: Mapping[str, Any] | None = None,
    source: str = "",
    options: QuantizeOptions | None = None,
    context: int = LENGTH,
    costs: Sequence[LayerCost] = (),
    smallest: Smallest | None = None,
) -> Report:
    """Return the report of the damage of schemes to a model.

    `costs` are those of single layers, and `smallest` is the model of chosen formats.

    `source` is what the model was asked for as, and `options` how, for a command to type; `context`
    is most tokens that it was made for.
    """
    full, names = damage_summary(damage), [*damage.schemes]
    source = source or damage.measurement.name
    steps = []
    if smallest is None:
        steps = [next_quantization(damage, source, options)]
    elif options is not None and not saved:
        ending = ".gguf" if smallest.target.tables else ""
        folder = str(free_folder(f"{source.rstrip('/')}-quantized{ending}"))
        command = command_of("quantize", replace(options, save=folder), source)
        steps = [NextStep("save it", command)]
    if saved:
        reading = options.text_flags if options else ""
        steps = after_saving(source, saved["folder"], context, reading=reading)
    file = ""
    if saved and not saved["folder"].endswith(".txt"):
        share = saved["bytes"] / full["bytes"]
        file = f"; the saved file has {megabytes(saved['bytes'])}, {share:.3f} of full precision"
    title = f"Quantization of {damage.measurement.name}"
    first, lead = list[Section](), [damage_headline(damage)]
    if smallest is not None:
        first = [smallest_section(damage, smallest)]
        lead = [proof_words(damage), *lead]
    return Report(title, lead, steps, [
        *first,
        Section("", [
            Findings({"": damage_findings(damage)}, GRADES),
            Text(f"Harmless: the loss rises by at most {HARMLESS} nats per token (perplexity by "
                 f"2%). Severe: by {SEVERE} or more (20%). Not resolved: its 95% interval includes "
                 f"zero and reaches past {HARMLESS}.", "note"),
        ]),
        Section("Before and after", [
            _damage_table(damage, full),
            terms([("nats and perplexity", "perplexity"), ("KL", "kl"),
                   ("median and worst layer", "relative_error")]),
            Text("Loss increases are paired: both models read the same tokens. Weights count what "
                 f"stays in full precision too{file}. Seconds: to quantize, "
                 "calibration included, and to read the text.", "note"),
        ], brief=True),
        *([_costs(costs, damage)] if costs else []),
        Section("Each layer alone", [
            Text("The error of a layer's output when only that layer is quantized and its input is "
                 "the full-precision one, beside how far the channels of its input stand apart. "
                 "Where kurtosis is high, one scale has to serve a few huge channels and many "
                 "small ones."),
            Text("Of all tokens but the first. Errors are root mean squares and kurtosis means "
                 "over the layers of a block; a Gaussian has kurtosis 3. Blocks that stand out are "
                 "named.", "note"),
            Legend(names),
            SideBySide([
                Chart("Relative error of each block's layers", partial(_errors, damage),
                      "Relative error", explain("relative_error")),
                Chart("Kurtosis of the inputs of each block's layers",
                      partial(_kurtosis, damage), "Kurtosis of the inputs",
                      explain("kurtosis")),
            ], wide=True),
            Text("Does error follow kurtosis?", "heading"),
            Text(full["kurtosis_predicts"]),
            Text(PREDICTS, "note"),
            Legend(names, "shapes"),
            Chart("Error of layers against the kurtosis of their inputs",
                  partial(_scatter, damage)),
        ]),
        Section("Layer by layer",
                [part for name in names for part in _scheme_layer_parts(damage, name)]),
        glossary("kl", "relative_error", "kurtosis"),
        method_section(method or {}),
    ])  # fmt: skip


def _costs(costs: Sequence[LayerCost], damage: Damage) -> Section:
    """Return the dearest layers, and in sentences what they say."""
    count = len(damage.measurement.counts)
    kurtosis = cost_frame(costs, damage)["kurtosis"]
    rows = [
        [cost.name, *(format_interval(*x, count, "+") for x in (cost.alone, cost.kl)),
         number(shape, "{:.3g}"), f"{cost.size:,}"]
        for cost, shape in zip(costs[:_DEAREST], kurtosis, strict=False)
    ]  # fmt: skip
    columns = ["layer", "alone, nats", "KL", "kurtosis", "bytes"]
    parts: list[Part] = [Text(sentence) for sentence in cost_sentences(costs, damage)]
    return Section("What layers cost", [*parts, Table(columns, rows, "Dearest layers")], brief=True)


PREDICTS = (
    "Predicts: Spearman's rank correlation of 0.5 or more, significantly above zero at the 95% "
    "level, treating layers as independent. The literature disagrees (arXiv 2509.23500)."
)


def _damage_table(damage: Damage, full: Mapping[str, Any]) -> Table:
    rows: list[Sequence[Cell | str]] = []
    for figures in full["schemes"]:
        estimates, module = with_intervals(figures, full["sequences"]), figures["worst_layer"]
        rows.append([
            figures["scheme"],
            GRADES[grade(damage, figures["scheme"])],
            estimates["loss_increase"],
            estimates["kl"],
            Cell(estimates["perplexity"], under=[estimates["increase"]]),
            number(figures["layer_error_median"], "{:.2%}"),
            Cell(number(figures["layer_error_worst"], "{:.2%}"),
                 under=[module.removeprefix("model.")] if module else []),
            Cell(megabytes(figures["bytes"]), f"{figures['bytes_ratio']:.0%}"),
            Cell(f"{figures['quantize_seconds']:.1f}", f"+ {figures['read_seconds']:.1f}"),
        ])  # fmt: skip
    before = perplexity_words(full, full["sequences"])
    first = ["full precision", "–", "–", "–", before, "–", "–", megabytes(full["bytes"]), "–"]
    return Table(
        ["scheme", "damage", "loss, nats per token", "KL, nats", "perplexity", "median layer",
         "worst layer", "weights", "seconds"],
        [first, *rows], "Damage of each scheme", marks=[("", ""), *charts.marks(damage.schemes)],
        terminal=("damage", "loss, nats per token", "KL, nats", "worst layer", "weights"),
    )  # fmt: skip


def _scheme_layer_parts(damage: Damage, name: str) -> Iterator[Part]:
    """Yield a scheme's error map and its table of worst layers.

    A scheme whose errors are nearly those of an earlier scheme gets one closed fold instead.
    """
    if damage.schemes[name].weights is None:
        yield from (Text(name, "heading"), Text("No layer's weights change.", "note"))
        return
    worst = worst_table(damage, name)
    chart = Chart(f"Relative error of every layer under {name}", partial(_layer_map, damage, name))
    errors = layer_errors(damage, name)["value"]
    names = list(damage.schemes)
    for earlier in names[: names.index(name)]:
        earlier_errors = layer_errors(damage, earlier)["value"]
        if len(earlier_errors) != len(errors):
            continue
        if ((earlier_errors / errors).log().abs().median() or 0) < _ALIKE:  # pyright: ignore
            yield Fold(f"{name}: nearly the same errors as {earlier}", [chart, worst])
            return
    yield from (Text(name, "heading"), chart)
    yield Fold(f"Worst layers of {name}", [worst], open=name == names[0])


def worst_table(damage: Damage, name: str) -> Table:
    """Return the layers whose error is the largest, with the shape of their inputs."""
    count = len(damage.measurement.counts)
    styles = {"first": "{:.2%}", "rest": "{:.2%}"} | dict.fromkeys(
        ("kurtosis_first", "kurtosis_rest"), "{:,.1f}"
    )
    rows = [
        [row["module"],
         Cell(number(row["value"], "{:.2%}"), number(far, "± {:.2%}", "")),
         *(number(row[key], style) for key, style in styles.items())]
        for row in worst_layers(damage, name)
        for far in [row["standard_error"] and interval_half_width(row["standard_error"], count)]
    ]  # fmt: skip
    columns = ["layer", "relative error", "first token", "the rest", "input kurtosis, first",
               "kurtosis, rest"]  # fmt: skip
    return Table(columns, rows, f"Worst layers of {damage.measurement.name} under {name}")


def number(value: float | None, style: str, none: str = "–") -> str:
    """Return a figure as a page has it; a dash or `none` where there is none."""
    return none if value is None else style.format(value).replace("-", "−")


def megabytes(count: float) -> str:
    """Return bytes as a page has them."""
    return ("{:,.0f} MB" if count >= 1e8 else "{:.2f} MB").format(count / 1e6)
