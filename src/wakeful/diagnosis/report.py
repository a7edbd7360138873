"""Report sections of a diagnosis, and of a cure, which is one before and one after."""

import math
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import altair as alt
import polars as pl

from wakeful.diagnosis.heads import (
    attention,
    describe_sink,
    hidden_states,
    maps,
    mean_attention,
    pooled_attention,
)
from wakeful.diagnosis.measure import ModelDiagnosis
from wakeful.diagnosis.verdict import (
    diagnosis_summary,
    findings,
    layer_values,
    lazy_layers,
    suggested_depth,
)
from wakeful.estimates import (
    INTERVAL,
    finite_or_none,
    format_estimate,
    interval_half_width,
    round_to_error,
)
from wakeful.finding import Advice, Level
from wakeful.probes.base import block_outputs, mean_over_layers
from wakeful.reports import charts
from wakeful.reports.terms import explain
from wakeful.reports.value import (
    Cell,
    Chart,
    Facts,
    Findings,
    Fold,
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
    ("first_key_mass_without_row_0", "paper", "all", "attention mass on key 0, without row 0",
     "share of attention"),
    ("entropy", "code", "all", "entropy of importance (nats)", "nats"),
    ("mass_columns", "paper", "all", "columns holding the mass", "columns"),
    ("value_eigenvalue", "paper", "1", "largest value eigenvalue", "eigenvalue"),
    ("max_activation", "paper", "first", "mean max |x|, first token", "mean max |x|"),
    ("max_activation", "paper", "rest", "mean max |x|, the rest", "mean max |x|"),
    ("token_similarity", "paper", "all", "token similarity (cosine)", "cosine"),
    ("block_influence", "paper", "all", "block influence", "1 − cos"),
    ("angular_distance", "paper", "last", "angular distance (of π)", "share of π"),
)  # fmt: skip
"""Metric, variant, position, title and vertical axis of each curve over layers."""
_FIRST = 6
"""Curves that the page shows before its details."""
_READ, _READ_OF_MANY = 60, 24
"""Tokens of the text that the page quotes, of one model and of several."""
_RANKS = {"rank", "mass_columns"}
_FEW_RANKS = (1, 10, 100, 1000, 10000)
_LOG = {"kurtosis", "max_activation", "residual_peak", "value_eigenvalue"}
_LOG_LABELS = "format(datum.value, datum.value < 1 ? '~g' : '~s')"


def layer_charts(diagnoses: Sequence[ModelDiagnosis]) -> list[Chart]:
    """Return a curve over layers for each metric, all models in each, with 95% intervals."""
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

    `title` names the metric in tooltips, `axis` on the y axis.
    """
    value = pl.col("value")

    def rows(model_diagnosis: ModelDiagnosis, at: str) -> pl.DataFrame:
        half = pl.col("standard_error").fill_null(0) * interval_half_width(
            1.0, max(2, model_diagnosis.num_sequences)
        )
        low, high = value - half, value + half
        if metric in _LOG:
            low = low.clip(lower_bound=value / 10)
        elif metric in _RANKS:
            low = low.clip(lower_bound=1)
        elif metric.startswith("first_key"):
            low, high = low.clip(*charts.SHARE), high.clip(*charts.SHARE)
        values = layer_values(model_diagnosis, metric, variant=variant, position=at)
        return values.select("layer", "value", "kind", low=low, high=high)

    frame = _concat_models(diagnoses, partial(rows, at=position))
    scale, ticks = alt.Scale(), alt.Axis(tickCount=4)
    if metric in _LOG:
        frame = _positive(frame)
        # The range covers the curves of all positions, so that their charts share a scale.
        edges = pl.concat(
            _positive(_concat_models(diagnoses, partial(rows, at=part))).select("low", "high")
            for curve_metric, _, part, *_ in _CURVES
            if curve_metric == metric
        )
        ticks = alt.Axis(labelExpr=_LOG_LABELS, tickCount=3)
        scale = alt.Scale(type="log")
        if not edges.is_empty():
            scale = alt.Scale(type="log", domain=(min(edges["low"]), max(edges["high"])))
    elif metric.startswith("first_key"):
        scale = alt.Scale(domain=charts.SHARE)
    elif metric in _RANKS:
        longest = max(diagnosis.length for diagnosis in diagnoses)
        scale = alt.Scale(type="log", domain=(1, longest), clamp=True)
        ticks = alt.Axis(values=[rank for rank in _FEW_RANKS if rank <= longest])
    y = alt.Y("value:Q", title=axis, scale=scale, axis=ticks)
    tooltip = ["model:N", "layer:Q", "kind:N", charts.tip("value", ",.4~g", title=title)]
    chart = charts.draw_lines(
        frame, "model", _names(diagnoses), charts.LAYERS, y, tooltip, outliers=metric in _LOG
    )
    return charts.wide(chart, 150)


def _names(diagnoses: Sequence[ModelDiagnosis]) -> list[str]:
    return [diagnosis.name for diagnosis in diagnoses]


def _concat_models(
    diagnoses: Sequence[ModelDiagnosis], rows: Callable[[ModelDiagnosis], pl.DataFrame]
) -> pl.DataFrame:
    return pl.concat(
        [rows(diagnosis).with_columns(model=pl.lit(diagnosis.name)) for diagnosis in diagnoses]
    )


def _positive(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows that a logarithmic axis has a place for: a zero would flatten all others."""
    return frame.filter(pl.col("value") > 0)


def diagnosis_headlines(
    diagnoses: Sequence[ModelDiagnosis], worse: Collection[str] = ()
) -> list[str]:
    """Return the verdicts, one sentence for all models with the same findings.

    No model among the `worse`, those whose cure cost loss, is called healthy.
    """
    verdicts: dict[tuple[str, str, str], list[str]] = {}
    for diagnosis in diagnoses:
        verdict = ("has", "have", _describe_problems(diagnosis) or _NO_PROBLEMS)
        if verdict[2] == _NO_PROBLEMS and diagnosis.name not in worse:
            verdict = ("is", "are", f"healthy: {_NO_PROBLEMS}")
        verdicts.setdefault(verdict, []).append(diagnosis.name)
    return [
        f"{listed(names)} {plural if len(names) > 1 else singular} {verdict_text}."
        for (singular, plural, verdict_text), names in verdicts.items()
    ]


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
    """Return the commands to run next: a cure for each sick model, or one `wakeful quantize` for
    all healthy ones, by the options `reading` on the text of the diagnosis.
    """
    cures = [
        _suggest_cure(diagnosis, source)
        for diagnosis, source in zip(diagnoses, sources, strict=True)
    ]
    healthy = [n for n, step in enumerate(cures) if step is None and not diagnoses[n].quantized]
    steps = [step for step in cures if step is not None and step.command]
    if healthy:
        names = listed(diagnoses[n].name for n in healthy)
        models = shlex.join(sources[n] for n in healthy)
        steps.append(NextStep(f"nothing to cure in {names}; see what quantization does",
                          f"wakeful quantize {models} {reading}".rstrip()))  # fmt: skip
    return steps


def _suggest_cure(diagnosis: ModelDiagnosis, source: str) -> NextStep | None:
    """Return the advised cure, or else to inherit without lazy layers; None if neither applies."""
    levels = {finding.title: finding.level for finding in findings(diagnosis)}
    model, depth, advice = shlex.quote(source), suggested_depth(diagnosis), diagnosis.advice
    if advice is not None:
        command = f"wakeful cure {model} {advice.arguments}" if advice.arguments else ""
        return NextStep(advice.words, command)
    lazy = levels["Lazy layers"] == "bad" and depth < diagnosis.num_layers
    if lazy and not diagnosis.quantized:
        return NextStep(f"train a model with the {depth} layers of {diagnosis.name} that work "
                    "(not tried: training tells what it costs)",
                    f"wakeful inherit {model} --layers {depth}")  # fmt: skip
    return None


def after_cure(
    source: str,
    folder: str | Path,
    schemes: Sequence[str] = (),
    advice: Advice | None = None,
    reading: str = "",
) -> list[NextStep]:
    """Return the commands to run after a cure of the model `source` was saved to `folder`.

    `schemes` are the quantization schemes the model was cured for; `reading` the options by which
    the cure read its text. Where the cure did not help, `advice` has the one to run instead.
    """
    if advice is not None and advice.arguments:
        return [NextStep(advice.words, f"wakeful cure {shlex.quote(source)} {advice.arguments}")]
    uncured, cured = shlex.quote(source), shlex.quote(str(folder))
    both, scheme_flags = f"{uncured} {cured}", shlex.join(["--scheme", *schemes]) if schemes else ""
    evaluate, quantize = (
        " ".join(filter(None, [verb, both, options, reading]))
        for verb, options in (("wakeful evaluate", ""), ("wakeful quantize", scheme_flags))
    )
    return [
        NextStep("compare it with the original on text", evaluate),
        NextStep("see what quantization costs each of them", quantize),
    ]


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

    `done` lists the cures of the last of several models as (name, description); `sources` name the
    models in suggested commands, which read the text by the options `reading`; `steps` replaces the
    suggestions; `worse` are the models whose cure cost loss.
    """
    names, many = _names(diagnoses), len(diagnoses) > 1
    named = sources if len(sources) == len(diagnoses) else names
    longest = max(model.length for model in diagnoses)
    curves = layer_charts(diagnoses)
    every_map = [maps(model, longest) for model in diagnoses]
    ahead = (0, 2) if len(diagnoses) < 3 else (0,)

    def some(first: bool) -> SideBySide:
        """Return a map or two of each model, or the others."""
        drawn = [
            chart
            for model_maps in every_map
            for number, chart in enumerate(model_maps)
            if (number in ahead) == first
        ]
        return SideBySide(drawn, wide=True)

    legend = Legend(names)
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
            legend, SideBySide(curves[:_FIRST]),
        ]),
        Section("The tokens", [*_token_parts(diagnoses)]),
        Section("Heads", [some(True)]),
        Section("Details", [
            Fold("More curves over layers", [legend, SideBySide(curves[_FIRST:])]),
            Fold("More maps of layers and heads", [some(False)]),
            *(fold for model in diagnoses for fold in _detail_folds(model)),
        ]),
        glossary("ill", "well", "rank", "row_0", "first_key_share", "lazy", "value_drain",
                 "residual_peak", "kurtosis"),
        method_section([*(method or {}).items(), MEANS]),
    ]  # fmt: skip
    steps = next_steps(diagnoses, named, reading) if steps is None else steps
    sentences = [*diagnosis_headlines(diagnoses, worse), *_without_command(diagnoses)]
    return Report(title or f"Diagnosis of {', '.join(names)}", sentences, steps, sections)


def _without_command(diagnoses: Sequence[ModelDiagnosis]) -> Iterator[str]:
    """Yield what is advised where no command helps."""
    for diagnosis in diagnoses:
        if diagnosis.advice is not None and not diagnosis.advice.arguments:
            yield f"{diagnosis.advice.words}."


def _comparison_table(diagnoses: Sequence[ModelDiagnosis]) -> Table:
    models = [(diagnosis_summary(diagnosis), _half_intervals(diagnosis)) for diagnosis in diagnoses]
    rows = [
        [Cell(label, explain(key)),
         *_comparison_cells(key, [(figures[key], reaches.get(key)) for figures, reaches in models])]
        for key, label in _COMPARED
        if any(figures[key] is not None for figures, _ in models)
    ]  # fmt: skip
    columns = ["mean over layers (block outputs)", *_names(diagnoses)]
    return Table(columns, rows, "Figures of each model", "figures", colored=True)


def _token_parts(diagnoses: Sequence[ModelDiagnosis]) -> Iterator[Part]:
    """Yield the beginning of the text, the sinks in it, and pictures of heads' attention."""
    many = len(diagnoses) > 1
    texts = [
        "".join(diagnosis.tokens[: _READ_OF_MANY if many else _READ]) for diagnosis in diagnoses
    ]
    same = many and len(set(texts)) == 1 and bool(texts[0])
    if same:
        yield Text("The text that all of them read begins:", "explained")
        yield Text(f"{texts[0]}…", "quote")
    if any(diagnosis.attention is not None and len(diagnosis.attention) for diagnosis in diagnoses):
        widest_follow = ", then the heads of the highest rank" if many else ""
        second = "" if many else "; the second picture has the heads of the highest rank"
        yield Text(
            "One head's attention among the first tokens of the first sequence: rows are queries, "
            "columns the keys they look at. Choose a head below its picture: the strongest sinks "
            f"come first{widest_follow}, then all others, layer by layer, among fewer tokens"
            f"{second}.",
            "explained",
        )
    groups: list[Part] = []
    for diagnosis, text in zip(diagnoses, texts, strict=True):
        parts: list[Part] = [Text(diagnosis.name, "heading")]
        if leads := describe_sink(diagnosis):
            parts.append(Text(leads))
        if text and not same:
            parts += [Text("The text it read begins:", "explained"), Text(f"{text}…", "quote")]
        if diagnosis.attention is None or diagnosis.attention.is_empty():
            parts.append(Chart(
                f"Mean attention of all heads and layers of {diagnosis.name}",
                partial(_mean_attention, diagnosis), explained=explain("mean_attention"),
            ))  # fmt: skip
        elif many:
            draw = partial(attention, diagnosis, "sinks, then widest")
            parts.append(Chart(f"Attention of a head of {diagnosis.name}", draw))
        groups.append(Group(parts))
    yield SideBySide(groups, wide=True)
    if not many:
        name = diagnoses[0].name
        yield SideBySide([
            Chart(f"Attention of a sink head of {name}", partial(attention, diagnoses[0], "sinks")),
            Chart(f"Attention of a head of high rank of {name}",
                  partial(attention, diagnoses[0], "widest")),
        ], wide=True)  # fmt: skip


def _mean_attention(diagnosis: ModelDiagnosis) -> charts.Drawing | None:
    return mean_attention([("", diagnosis.rows.filter(metric="mean_attention"))])


def _detail_folds(diagnosis: ModelDiagnosis) -> Iterator[Fold]:
    """Yield a model's attention over whole sequences, outlier channels, hidden states."""
    if not diagnosis.rows.filter(metric="attention_picture").is_empty():
        yield Fold(f"Attention of {diagnosis.name}'s heads over whole sequences", [
            Chart(f"Attention of a head over whole sequences of {diagnosis.name}",
                  partial(pooled_attention, diagnosis),
                  explained="Rows are queries, columns keys, each a fraction of the sequence: the "
                  "weights in a bin of keys summed, the mean over queries and sequences. Lower "
                  "triangles, and what a relaxed prefix lets see."),
        ])  # fmt: skip
    rows = [
        [str(row["variant"]), f"{row['value']:,.1f}", str(row["layer"]), str(row["position"]),
         str(row["layers"])]
        for row in _outlier_channels(diagnosis)
    ]  # fmt: skip
    columns = ["channel", "largest |x|", "in layer", "at token",
               "layers where it is among the top five"]  # fmt: skip
    parts: list[Part] = [
        Table(columns, rows, f"Outlier channels of {diagnosis.name}"),
        Chart(f"Magnitude of hidden states of {diagnosis.name}",
              lambda: hidden_states([("", diagnosis.rows.filter(metric="hidden_picture"))]),
              "Hidden-state magnitude, first positions by channel", explain("hidden_magnitude")),
    ]  # fmt: skip
    shows = diagnosis.attention is not None and not diagnosis.attention.is_empty()
    if shows:  # else it stands in the open
        parts.append(Chart(f"Mean attention of all heads and layers of {diagnosis.name}",
                           partial(_mean_attention, diagnosis),
                           "Mean attention of all heads and layers, first positions"))  # fmt: skip
    also = " and mean attention" if shows else ""
    yield Fold(f"Outlier channels{also} of {diagnosis.name}", parts)


def _outlier_channels(diagnosis: ModelDiagnosis) -> list[dict[str, object]]:
    """Return the channels that stand out in most layers, with where they are largest."""
    rows = block_outputs(diagnosis.rows.filter(metric="outlier_channel"))
    largest = pl.col("value", "layer", "position").first()
    top = (
        rows.sort("value", descending=True)
        .group_by("variant", maintain_order=True)
        .agg(largest, layers=pl.len())
        .sort("value", descending=True)
    )
    return top.head(8).to_dicts()


def _half_intervals(diagnosis: ModelDiagnosis) -> dict[str, float | None]:
    """Return half the width of each figure's 95% confidence interval over sequences.

    For a mean over layers it is an upper bound: the mean of the layers' errors, as if all layers
    moved together.
    """

    def mean(metric: str, **where: str) -> float | None:
        rows = layer_values(diagnosis, metric, **where).with_columns(value=pl.col("standard_error"))
        return mean_over_layers(rows.drop_nulls("value"))

    first_token_keys = [
        key for key, _ in _COMPARED if key.startswith(("first_key", "stored_prefix"))
    ]
    errors = {
        "loss": finite_or_none(diagnosis.loss_error),
        "entropy": mean("entropy", variant="code"),
        "value_drain": mean("value_drain", position="first"),
        **{key: mean(key) for key in first_token_keys},
        **{
            f"{metric}_{position}": mean(metric, position=position)
            for metric in ("kurtosis", "max_activation")
            for position in ("first", "rest")
        },
    }
    count = diagnosis.num_sequences
    return {key: error and interval_half_width(error, count) for key, error in errors.items()}


def _comparison_cells(key: str, values: Sequence[tuple[float | None, float | None]]) -> list[Cell]:
    """Return a row of models' figures ± half intervals, with differences to the first model's."""
    base, base_half = values[0]
    cells: list[Cell] = []
    for value, half in values:
        if value is None:
            cells.append(Cell("–"))
            continue
        change = value - (value if base is None else base)
        figure, gap = rough(value), f"{'−' if change < 0 else '+'}{rough(abs(change))}"
        if key in _COUNTED:
            figure, gap = f"{value:.4g}", f"{change:+.3g}".replace("-", "−")
        elif half:
            difference_half = math.hypot(half, base_half or 0.0)
            figure, gap = (
                format_estimate(value, half),
                round_to_error(change, difference_half, "+"),
            )
        cells.append(Cell(figure, gap if change else ""))
    return cells
