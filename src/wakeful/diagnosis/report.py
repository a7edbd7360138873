"""Report sections of a diagnosis, and of a cure, which is one before and one after."""

import math
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import altair as alt
import polars as pl

from wakeful.diagnosis.heads import draw_attention, head_maps
from wakeful.diagnosis.measure import ModelDiagnosis
from wakeful.diagnosis.verdict import diagnosis_summary, findings, layer_values, lazy_layers
from wakeful.estimates import (
    INTERVAL,
    finite_or_none,
    format_estimate,
    interval_half_width,
    round_to_error,
)
from wakeful.finding import Level
from wakeful.probes.base import mean_over_layers
from wakeful.reports import charts
from wakeful.reports.terms import explain
from wakeful.reports.value import (
    Cell,
    Chart,
    Facts,
    Findings,
    Group,
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
    rough,
)

LEVELS: Mapping[Level, str] = {"good": "healthy", "mixed": "some", "bad": "strong"}
MEANS = ("Means over layers", "over block outputs, the embedding left out")
_SHARE = "first_key_share_without_row_0"
_COMPARED = (
    ("loss", "loss (nats)"),
    (_SHARE, "first-token share, without row 0"),
    ("first_key_share_with_row_0", "first-token share, with row 0"),
    ("first_key_mass_without_row_0", "first-token mass, without row 0"),
    ("first_key_mass_with_row_0", "first-token mass, with row 0"),
    ("stored_prefix_mass", "mass on the stored prefix"),
    ("entropy", "entropy (nats)"),
    ("median_head_rank", "median head rank"),
    ("heads_near_rank_1", "heads near rank 1"),
    ("value_drain", "value drain, first"),
    ("kurtosis_first", "kurtosis, first"),
    ("kurtosis_rest", "kurtosis, rest"),
    ("max_activation_first", "mean max |x|, first"),
    ("max_activation_rest", "mean max |x|, rest"),
)
_NO_PROBLEMS = "no sinks, lazy layers, drained values or outliers"
_COUNTED = {"median_head_rank", "heads_near_rank_1"}
"""Figures that have no error over sequences."""
_CURVES = (
    (_SHARE, "paper", "all", "share of pairs led by key 0, without row 0", "share of pairs"),
    ("rank", "paper", "all", "largest head rank", "rank"),
    ("value_drain", "paper", "first", "‖v₀‖ over the others' mean", "ratio of norms"),
    ("residual_peak", "paper", "first", "‖h₀‖ over the others' mean", "ratio of norms"),
    ("kurtosis", "paper", "first", "kurtosis, first token", "kurtosis"),
    ("kurtosis", "paper", "rest", "kurtosis, the rest", "kurtosis"),
)  # fmt: skip
"""Metric, variant, position, title and vertical axis of each curve over layers."""
_READ, _READ_OF_MANY = 60, 24
"""Number of tokens of the text that the page quotes, of one model and of several."""
_FEW_RANKS = (1, 10, 100, 1000, 10000)
_LOG = {"kurtosis", "residual_peak"}
_LOG_LABELS = "format(datum.value, datum.value < 1 ? '~g' : '~s')"


def layer_charts(diagnoses: Sequence[ModelDiagnosis]) -> list[Chart]:
    """Return a chart for each entry of `_CURVES`, a metric: curves over layers, one for each model,
    with 95% intervals.
    """
    return [
        Chart(f"{title}, over layers",
              partial(_draw_curve, diagnoses, metric, variant, position, title, axis),
              title, explain(f"{metric}_{position}"))
        for metric, variant, position, title, axis in _CURVES
    ]  # fmt: skip


def _draw_curve(
    diagnoses: Sequence[ModelDiagnosis],
    metric: str,
    variant: str,
    position: str,
    title: str,
    axis: str,
) -> charts.Drawing:
    """Draw a metric over layers, a line for each model with its 95% confidence band.

    `metric`, `variant` and `position` choose the rows. `title` names the metric in tooltips, `axis`
    on the y axis.
    """

    def curve_at(model_diagnosis: ModelDiagnosis, at: str) -> pl.DataFrame:
        """Return a model's curve at position `at`: layer, value, kind, low, high."""
        values = layer_values(model_diagnosis, metric, variant=variant, position=at)
        low, high = _band(metric, model_diagnosis.num_sequences)
        return values.select("layer", "value", "kind", low=low, high=high)

    frame = _concat_models(diagnoses, partial(curve_at, at=position))
    scale, ticks = alt.Scale(), alt.Axis(tickCount=4)
    if metric in _LOG:
        frame = _positive(frame)
        # The range covers the curves of all positions, so that their charts share a scale.
        bands = pl.concat(
            _positive(_concat_models(diagnoses, partial(curve_at, at=at))).select("low", "high")
            for curve_metric, _, at, *_ in _CURVES
            if curve_metric == metric
        )
        ticks = alt.Axis(labelExpr=_LOG_LABELS, tickCount=3)
        scale = alt.Scale(type="log")
        if not bands.is_empty():
            scale = alt.Scale(type="log", domain=(min(bands["low"]), max(bands["high"])))
    elif metric.startswith("first_key"):
        scale = alt.Scale(domain=charts.SHARE)
    elif metric == "rank":
        longest = max(diagnosis.length for diagnosis in diagnoses)
        scale = alt.Scale(type="log", domain=(1, longest), clamp=True)
        ticks = alt.Axis(values=[rank for rank in _FEW_RANKS if rank <= longest])
    y = alt.Y("value:Q", title=axis, scale=scale, axis=ticks)
    tooltip = ["model:N", "layer:Q", "kind:N", charts.tip("value", ",.4~g", title=title)]
    chart = charts.draw_lines(frame, "model", _names(diagnoses), charts.LAYERS, y, tooltip)
    return charts.wide(chart, 150)


def _band(metric: str, num_sequences: int) -> tuple[pl.Expr, pl.Expr]:
    """Return the lower and the upper end of a metric's 95% interval, cut to what its axis shows.

    Both are expressions of the columns `value` and `standard_error`.
    """
    value = pl.col("value")
    # A single sequence has no error, hence a band of no width; max keeps the factor finite.
    factor = interval_half_width(1.0, max(2, num_sequences))
    half_width = pl.col("standard_error").fill_null(0) * factor
    low, high = value - half_width, value + half_width
    if metric in _LOG:
        # A logarithmic axis has no place for 0: the band goes down one power of ten at most.
        low = low.clip(lower_bound=value / 10)
    elif metric == "rank":
        low = low.clip(lower_bound=1)
    elif metric.startswith("first_key"):
        low, high = low.clip(*charts.SHARE), high.clip(*charts.SHARE)
    return low, high


def _names(diagnoses: Sequence[ModelDiagnosis]) -> list[str]:
    return [diagnosis.name for diagnosis in diagnoses]


def _concat_models(
    diagnoses: Sequence[ModelDiagnosis], rows_of: Callable[[ModelDiagnosis], pl.DataFrame]
) -> pl.DataFrame:
    """Return the rows of all models in one frame, with the model's name in the column `model`;
    `rows_of` returns a model's rows.
    """
    return pl.concat(
        [rows_of(diagnosis).with_columns(model=pl.lit(diagnosis.name)) for diagnosis in diagnoses]
    )


def _positive(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with a value over 0, which alone have a place on a logarithmic axis."""
    return frame.filter(pl.col("value") > 0)


def diagnosis_headlines(
    diagnoses: Sequence[ModelDiagnosis], worse: Collection[str] = ()
) -> list[str]:
    """Return one sentence for each group of models with the same findings.

    `worse` names models whose cure raised the loss: they are not called healthy even if they have
    no problem.
    """
    # By verdict (verb of one model, verb of several, the rest of the sentence): the models' names.
    names_by_verdict: dict[tuple[str, str, str], list[str]] = {}
    for diagnosis in diagnoses:
        problems = _describe_problems(diagnosis)
        if problems or diagnosis.name in worse:
            verdict = ("has", "have", problems or _NO_PROBLEMS)
        else:
            verdict = ("is", "are", f"healthy: {_NO_PROBLEMS}")
        names_by_verdict.setdefault(verdict, []).append(diagnosis.name)
    sentences = list[str]()
    for (singular, plural, text), names in names_by_verdict.items():
        verb = plural if len(names) > 1 else singular
        sentences.append(f"{listed(names)} {verb} {text}.")
    return sentences


def _describe_problems(diagnosis: ModelDiagnosis) -> str:
    """Return the findings that are not good as a phrase, such as "strong attention sinks"."""
    adjectives = {"bad": "strong ", "mixed": "some "}
    names = {
        "Attention sinks": "attention sinks", "Drained values": "drained values",
        "Lazy layers": "lazy layers" if lazy_layers(diagnosis) else "lazy heads",
        "Outlier activations": "outliers",
    }  # fmt: skip
    problems = (finding for finding in findings(diagnosis) if finding.level != "good")
    return listed(adjectives[finding.level] + names[finding.title] for finding in problems)


def next_steps(
    diagnoses: Sequence[ModelDiagnosis], sources: Sequence[str], reading: str = ""
) -> list[NextStep]:
    """Return the commands to run next: a cure for each model that has one, and one `wakeful
    quantize` for all healthy models that are not quantized yet.

    `sources` name the models in commands; `reading` are the options that read the diagnosed text.
    """
    # None for a healthy model; a step without a command if no cure helps.
    cures = [
        _suggest_cure(diagnosis, source)
        for diagnosis, source in zip(diagnoses, sources, strict=True)
    ]
    steps = [cure for cure in cures if cure is not None and cure.command]
    healthy = [
        (diagnosis.name, source)
        for diagnosis, source, cure in zip(diagnoses, sources, cures, strict=True)
        if cure is None and not diagnosis.quantized
    ]
    if healthy:
        names = listed(name for name, _ in healthy)
        models = shlex.join(source for _, source in healthy)
        steps.append(NextStep(f"nothing to cure in {names}; see what quantization does",
                          f"wakeful quantize {models} {reading}".rstrip()))  # fmt: skip
    return steps


def _suggest_cure(diagnosis: ModelDiagnosis, source: str) -> NextStep | None:
    """Return the step that the diagnosis advises; None without advice. Its command is "" if no cure
    helps.
    """
    advice = diagnosis.advice
    if advice is None:
        return None
    command = f"wakeful cure {shlex.quote(source)} {advice.arguments}" if advice.arguments else ""
    return NextStep(advice.words, command)


def after_cure(
    source: str,
    folder: str | Path,
    schemes: Sequence[str] = (),
    reading: str = "",
    *,
    helped: bool = True,
) -> list[NextStep]:
    """Return the commands to run after the model `source` was cured and saved to `folder`.

    `schemes` are the quantization schemes that it was cured for; `reading` are the options by which
    the cure read its text. If the cure did not help, since it raised the loss, a diagnosis that
    looks for another is the only step.
    """
    if not helped:
        command = f"wakeful diagnose {shlex.quote(source)} {reading}".rstrip()
        return [NextStep("see which cure does not raise the loss", command)]
    models = shlex.join([source, str(folder)])
    quantize = shlex.join(["--scheme", *schemes]) if schemes else ""
    return [
        NextStep("compare it with the original on text",
                 " ".join(filter(None, ["wakeful evaluate", models, reading]))),
        NextStep("see what quantization costs each of them",
                 " ".join(filter(None, ["wakeful quantize", models, quantize, reading]))),
    ]  # fmt: skip


def diagnosis_report(
    diagnoses: Sequence[ModelDiagnosis],
    *,
    title: str = "",
    method: Mapping[str, str] | None = None,
    done: Sequence[tuple[str, str]] = (),
    sources: Sequence[str] = (),
    reading: str = "",
    steps: Sequence[NextStep] | None = None,
    worse: Collection[str] = (),
) -> Report:
    """Return the report of models' measurements on a text.

    `done` lists the steps of the last model's cure as (name, description). `sources` name the
    models in suggested commands; without a source for each, their names do. `reading` are the
    options by which the commands read the same text. `steps` replaces the suggestions. `worse`
    names models whose cure raised the loss.
    """
    names, many = _names(diagnoses), len(diagnoses) > 1
    command_names = sources if len(sources) == len(diagnoses) else names
    longest = max(model.length for model in diagnoses)
    sections = [
        *([Section("What was done", [Facts(done)], brief=True)] if done else []),
        Section("Verdict", [Findings({model.name: findings(model) for model in diagnoses}, LEVELS)],
                brief=True),
        Section("Figures", [
            _comparison_table(diagnoses),
            Text(f"± is the {INTERVAL} over sequences; of a mean over layers, the most that it can "
                 "be" + (f". Differences, in small, are to {names[0]} and not paired." if many
                         else "."), "note"),
        ]),
        Section("Layer by layer", [
            Text("Bands are 95% confidence intervals over sequences. Layer −1 is the embedding: it "
                 "is shown, and left out of every mean over layers. Layers that stand out are "
                 "named.", "note"),
            Legend(names), SideBySide(layer_charts(diagnoses)),
        ]),
        Section("The tokens", [*_token_parts(diagnoses)]),
        Section("Heads", [
            SideBySide([
                chart for model in diagnoses
                for chart in head_maps(model, longest, only_mass=len(names) > 2)
            ], wide=True),
        ]),
        glossary("ill", "well", "rank", "row_0", "first_key_share", "lazy", "value_drain",
                 "residual_peak", "kurtosis"),
        method_section([*(method or {}).items(), MEANS]),
    ]  # fmt: skip
    steps = next_steps(diagnoses, command_names, reading) if steps is None else steps
    sentences = [*diagnosis_headlines(diagnoses, worse), *_advice_without_command(diagnoses)]
    return Report(title or f"Diagnosis of {', '.join(names)}", sentences, steps, sections)


def _advice_without_command(diagnoses: Sequence[ModelDiagnosis]) -> Iterator[str]:
    """Yield each model's advice that comes without a command, because no cure that was tried
    helps.
    """
    for diagnosis in diagnoses:
        if diagnosis.advice is not None and not diagnosis.advice.arguments:
            yield f"{diagnosis.advice.words}."


def _comparison_table(diagnoses: Sequence[ModelDiagnosis]) -> Table:
    """Return a table of the figures in `_COMPARED`, a column for each model; figures that no model
    has are left out.
    """
    models = [(diagnosis_summary(diagnosis), _half_intervals(diagnosis)) for diagnosis in diagnoses]
    rows: list[list[Cell]] = []
    for key, label in _COMPARED:
        values = [(figures[key], half_intervals.get(key)) for figures, half_intervals in models]
        if any(value is not None for value, _ in values):
            rows.append([Cell(label, explain(key)), *_comparison_cells(key, values)])
    columns = ["mean over layers (block outputs)", *_names(diagnoses)]
    return Table(columns, rows, "Figures of each model", "figures", colored=True)


def _token_parts(diagnoses: Sequence[ModelDiagnosis]) -> Iterator[Part]:
    """Yield the beginning of the text and, side by side for all models, pictures of their heads'
    attention. The text is quoted once if all models read the same, else beside each.
    """
    many = len(diagnoses) > 1
    num_tokens = _READ_OF_MANY if many else _READ
    texts = ["".join(diagnosis.tokens[:num_tokens]) for diagnosis in diagnoses]
    all_read_the_same = many and len(set(texts)) == 1 and bool(texts[0])
    if all_read_the_same:
        yield Text("The text that all of them read begins:", "explained")
        yield Text(f"{texts[0]}…", "quote")
    yield Text(
        "One head's attention among the first tokens of the first sequence: rows are queries, "
        "columns the keys they look at. Choose a head below its picture: the strongest sinks come "
        "first, then the heads of the highest rank, then all others, layer by layer, among fewer "
        "tokens.",
        "explained",
    )
    groups: list[Part] = []
    for diagnosis, text in zip(diagnoses, texts, strict=True):
        parts: list[Part] = [Text(diagnosis.name, "heading")]
        if text and not all_read_the_same:
            parts += [Text("The text it read begins:", "explained"), Text(f"{text}…", "quote")]
        # Without data the picture stays empty, and the page leaves it out.
        heading = f"Attention of a head of {diagnosis.name}"
        parts.append(Chart(heading, partial(draw_attention, diagnosis)))
        groups.append(Group(parts))
    yield SideBySide(groups, wide=True)


def _half_intervals(diagnosis: ModelDiagnosis) -> dict[str, float | None]:
    """Return half the width of each figure's 95% confidence interval over sequences; None or 0 if
    the figure has no error.

    For a mean over layers it is an upper bound: the mean of the layers' errors, as if all layers
    moved together.
    """

    def mean_error(metric: str, **where: str) -> float | None:
        """Return the mean over layers of a metric's standard errors."""
        rows = layer_values(diagnosis, metric, **where).with_columns(value=pl.col("standard_error"))
        return mean_over_layers(rows.drop_nulls("value"))

    attention_keys = [key for key, _ in _COMPARED if key.startswith(("first_key", "stored_prefix"))]
    errors = {
        "loss": finite_or_none(diagnosis.loss_error),
        "entropy": mean_error("entropy", variant="code"),
        "value_drain": mean_error("value_drain", position="first"),
        **{key: mean_error(key) for key in attention_keys},
        **{
            f"{metric}_{position}": mean_error(metric, position=position)
            for metric in ("kurtosis", "max_activation")
            for position in ("first", "rest")
        },
    }
    count = diagnosis.num_sequences
    # `error and` lets None and 0 pass.
    return {key: error and interval_half_width(error, count) for key, error in errors.items()}


def _comparison_cells(key: str, values: Sequence[tuple[float | None, float | None]]) -> list[Cell]:
    """Return the cells of the figure `key`, one for each model: its value, and in small the
    difference to the first model's value.

    `values` are pairs (value, half the width of its confidence interval); a model without a value
    gets a dash.
    """
    base, base_half = values[0]
    cells: list[Cell] = []
    for value, half in values:
        if value is None:
            cells.append(Cell("–"))
            continue
        difference = 0.0 if base is None else value - base
        if key in _COUNTED:
            text = f"{value:.4g}"
            difference_text = f"{difference:+.3g}".replace("-", "−")
        elif half:
            # The difference is not paired: its interval is that of independent values.
            difference_half = math.hypot(half, base_half or 0.0)
            text = format_estimate(value, half)
            difference_text = round_to_error(difference, difference_half, "+")
        else:
            sign = "−" if difference < 0 else "+"
            text, difference_text = rough(value), f"{sign}{rough(abs(difference))}"
        cells.append(Cell(text, difference_text if difference else ""))
    return cells
