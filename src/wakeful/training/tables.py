"""A comparison as tidy tables: final figures, training curves, differing configuration fields.

Curves are smoothed by a trailing mean: a point is the mean of its own step and the `window` − 1
steps before it, as the paper's curves over 10 or 100 steps. A loss that is not a number is left
out of the means it would be in.
"""

import math
from typing import Any

import numpy as np
import polars as pl

from wakeful.config.rows import flatten_config
from wakeful.estimates import (
    Estimate,
    confidence_interval,
    mean_and_error,
    mean_paired_difference,
    perplexity,
    student_quantile,
)  # fmt: skip
from wakeful.training.compared import ComparedRuns, Pairs, TrainedRun
from wakeful.training.validation import mean_loss

_MOST_POINTS = 500


def summary_table(comparison: ComparedRuns) -> pl.DataFrame:
    """Return one row per variant: losses, paired differences, size, cache and speed.

    Losses and differences, in nats per token, are over the seeds shared with the baseline: `seeds`
    is their number, `seeds_used` lists them. With several seeds the loss is their mean and errors
    are over seeds; with one, errors are over validation windows (`paired_over`). `errors_of` is the
    number of these seeds or windows. A column's `_error` is the standard error; `_low` and `_high`
    are the ends of the 95% confidence interval (Student's t). Perplexity and its interval are e to
    those of the loss. `_ratio` is the ratio to the baseline, null where the baseline's figure is 0.
    """
    rows: list[dict[str, Any]] = []
    for variant in comparison.variants:
        runs = comparison.compared(variant)
        run_losses = [mean_loss(run.validation) for run in runs]  # with their errors over windows
        if len(runs) > 1:
            loss, error = mean_and_error([mean for mean, _ in run_losses])
            count = len(runs)
        else:
            loss, error = run_losses[0]
            count = len(runs[0].validation)
        low, high = confidence_interval(loss, error, count)
        difference, difference_error = paired_difference(comparison, variant)
        ends = confidence_interval(difference, difference_error, pairs_counted(comparison, variant))
        summaries = [run.summary for run in runs]
        rows.append(
            {
                "variant": variant,
                "seeds": len(runs),
                "seeds_used": ", ".join(str(run.seed) for run in runs),
                "loss": loss,
                "loss_error": error,
                "loss_low": low,
                "loss_high": high,
                "difference": difference,
                "difference_error": difference_error,
                "difference_low": ends[0],
                "difference_high": ends[1],
                "paired_over": comparison.paired_over(variant),
                "errors_of": count,
                "perplexity": perplexity(loss),
                "perplexity_low": perplexity(low),
                "perplexity_high": perplexity(high),
                "parameters": summaries[0].parameters.total,
                "cache_bytes": summaries[0].kv_cache_bytes_per_token,
                "tokens_per_second": float(np.median([s.tokens_per_second for s in summaries])),
                "seconds": float(np.mean([s.seconds for s in summaries])),
            }
        )
    return pl.DataFrame(rows).with_columns(
        parameters_ratio=_ratio("parameters"),
        cache_ratio=_ratio("cache_bytes"),
        speed_ratio=_ratio("tokens_per_second"),
    )


def paired_difference(comparison: ComparedRuns, variant: str) -> Estimate:
    """Return the variant's final validation loss minus the baseline's, with its standard error.

    With several seeds in common, the losses are subtracted seed by seed; the result is the mean of
    these differences, and its error is over seeds (`mean_and_error`). With one seed in common, they
    are subtracted window by window of the validation text (`mean_paired_difference`). Both figures
    are NaN without a seed in common, and 0 for the baseline itself.
    """
    if variant == comparison.baseline:
        return 0.0, 0.0
    pairs = comparison.pairs(variant)
    if not pairs:
        return math.nan, math.nan
    windows = [(run.validation, base.validation) for run, base in pairs]
    if len(pairs) > 1:
        return mean_and_error([mean_loss(run)[0] - mean_loss(base)[0] for run, base in windows])
    run, base = windows[0]
    return mean_paired_difference(run["loss"], base["loss"], run["tokens"])


def pairs_counted(comparison: ComparedRuns, variant: str) -> int:
    """Return the number of pairs behind a variant's difference: seeds, or windows of one seed."""
    pairs = comparison.pairs(variant)
    return len(pairs[0][0].validation) if len(pairs) == 1 else len(pairs)


def _ratio(column: str) -> pl.Expr:
    """Return a column over its first row, the baseline's; null where that is zero."""
    first = pl.col(column).first()
    return pl.when(first > 0).then(pl.col(column) / first)


def relative_training_loss(comparison: ComparedRuns, window: int) -> pl.DataFrame:
    """Return the smoothed training loss minus the baseline's at each step (fig. 1 of the paper).

    `window` is the number of steps to smooth over. The columns are variant, step, difference, low
    and high, in nats per token. Runs are paired by seed and by step. With several seeds the
    difference is their mean, low to high its 95% confidence interval over seeds, and steps that a
    seed lacks are left out. With one seed low and high are null. Without any pair of runs the frame
    is empty, without columns.
    """
    frames = [
        _relative_curve(pairs, window).select(pl.lit(variant).alias("variant"), pl.all())
        for variant in comparison.variants
        if variant != comparison.baseline and (pairs := comparison.pairs(variant))
    ]
    return pl.concat(frames) if frames else pl.DataFrame()


def training_loss(comparison: ComparedRuns, window: int) -> pl.DataFrame:
    """Return the smoothed training loss of each variant's first seed: variant, step, loss."""
    frames: list[pl.DataFrame] = []
    for variant in comparison.variants:
        rows = training_rows(comparison.of(variant)[0])
        curve = rows.select("step", loss=_smooth(rows["loss"], window))
        frames.append(_subsampled(curve).select(pl.lit(variant).alias("variant"), pl.all()))
    return pl.concat(frames)


def training_rows(run: TrainedRun) -> pl.DataFrame:
    """Return a run's training steps in order, each once, as last logged."""
    rows = run.metrics.filter(pl.col("kind") == "train", pl.col("step").is_not_null())
    return rows.unique("step", keep="last", maintain_order=True).sort("step")


def _relative_curve(pairs: Pairs, window: int) -> pl.DataFrame:
    """Return the smoothed loss minus the baseline's, the mean over the pairs (run, baseline run).

    The columns are `step`, `difference`, and the ends `low` and `high` of its 95% interval over
    pairs, null with one pair. Only steps that all pairs have are taken, at most `_MOST_POINTS`.
    """
    curves: list[pl.DataFrame] = []
    for run, base in pairs:
        base_losses = training_rows(base).select("step", base="loss")
        joined = training_rows(run).join(base_losses, on="step", maintain_order="left")
        curves.append(
            joined.select("step", difference=_smooth(joined["loss"] - joined["base"], window))
        )
    gathered = (  # a list of the pairs' differences for each step
        pl.concat(curves)
        .group_by("step", maintain_order=True)
        .agg("difference", num_pairs=pl.len())
        .filter(pl.col("num_pairs") == len(pairs))
        .sort("step")
    )
    curve = _with_errors(_subsampled(gathered), "difference")
    half_width = pl.col("error") * student_quantile(len(pairs) - 1)
    half_width = pl.when(len(pairs) > 1).then(half_width)  # otherwise null
    mean = pl.col("difference")
    return curve.select("step", mean, low=mean - half_width, high=mean + half_width)


def _with_errors(frame: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return the frame with the lists in `column` replaced by their means, and with a new column
    `error` of the means' standard errors.
    """
    estimates = [mean_and_error(values) for values in frame[column].to_list()]
    schema = {column: pl.Float64, "error": pl.Float64}
    return frame.with_columns(pl.DataFrame(estimates, schema=schema, orient="row"))


def _smooth(losses: pl.Series, window: int) -> np.ndarray:
    """Return the trailing mean of the losses that are numbers; NaN where a window has none."""
    finite = losses.set(~losses.is_finite(), None)
    return finite.rolling_mean(window, min_samples=1).fill_null(math.nan).to_numpy()


def _subsampled(frame: pl.DataFrame) -> pl.DataFrame:
    """Return at most `_MOST_POINTS` rows of a curve at equal distances, the last row included."""
    every = max(1, math.ceil(len(frame) / _MOST_POINTS))
    start = (len(frame) - 1) % every  # so that the last row is taken
    return frame[start::every]


def followed_figures(comparison: ComparedRuns) -> pl.DataFrame:
    """Return the figures that runs logged over steps: one row per `figure`, `variant` and `step`.

    `value` is the mean over the variant's seeds, `error` its standard error (NaN for one seed) and
    `seeds` their number. Steps that a seed of the variant has not logged are left out.
    """
    keys = ("figure", "variant", "step")
    parts = [
        run.followed.with_columns(variant=pl.lit(variant))
        for variant in comparison.variants
        for run in comparison.of(variant)
    ]
    # A list of the seeds' values for each figure, variant and step.
    values = pl.concat(parts).group_by(keys).agg("value", seeds=pl.len()).sort(keys)
    num_seeds = pl.col("seeds").max().over("figure", "variant")
    complete = values.filter(pl.col("seeds") == num_seeds)
    return _with_errors(complete, "value").select(
        "figure", "variant", "step", "value", "error", "seeds"
    )


def smoothing_window(comparison: ComparedRuns) -> int:
    """Return the steps to smooth over: the paper's 100, or a tenth of a shorter run."""
    steps = min(run.config.train.steps for run in comparison.runs)
    return max(1, min(100, steps // 10))


def differing_fields(comparison: ComparedRuns) -> list[tuple[str, str]]:
    """Return (variant, configuration fields with their values as text) for each variant, the
    baseline first.

    For the baseline these are all fields in which any variant differs from it, for another variant
    those in which it differs. The seed is left out. The list is empty if nothing differs.
    """
    runs = [comparison.of(variant)[0] for variant in comparison.variants]
    base, *others = [flatten_config(run.config) for run in runs]
    changes: list[dict[str, Any]] = []
    for other in others:
        changed = {key: value for key, value in other.items() if value != base[key]}
        changed.pop("train.seed", None)  # the first seeds of two variants may differ
        changes.append(changed)
    base_fields = {key: base[key] for changed in changes for key in changed}
    if not base_fields:
        return []
    rows: list[tuple[str, str]] = []
    for run, fields in zip(runs, [base_fields, *changes], strict=True):
        texts = [f"{key} = {_value_text(value)}" for key, value in fields.items()]
        rows.append((run.variant, "; ".join(texts)))
    return rows


def same_tokens(comparison: ComparedRuns) -> bool:
    """Return whether all finished runs were trained on the same number of tokens."""
    return len({run.summary.tokens for run in comparison.runs}) == 1


def machines(comparison: ComparedRuns) -> list[str]:
    """Return a description of each machine and version that finished runs were trained on."""
    places = [run.environment for run in comparison.runs]
    versions = "{0.computer}; torch {0.torch}, Python {0.python}, wakeful {0.wakeful}"
    return list(dict.fromkeys(map(versions.format, places)))


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
