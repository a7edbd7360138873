"""Training losses over steps: smoothed, and as differences to the baseline's.

Smoothing is a trailing mean: a point is the mean of its own step and the `window` − 1 steps before
it, as the paper's curves over 10 or 100 steps. A loss that is not a number is left out of the
means it would be in.
"""

import numpy as np
import polars as pl

from wakeful.estimates import mean_and_error, running_mean
from wakeful.pages.comparison.reading import Comparison, TrainedRun

_MOST_POINTS = 500


def relative_training_loss(comparison: Comparison, window: int) -> pl.DataFrame:
    """Return the smoothed training loss minus the baseline's at each step (fig. 1 of the paper).

    Columns: variant, step, tokens, difference, low, high (nats a token). Runs are paired by seed
    and by step; with several seeds the difference is their mean and low to high is ± one standard
    error over seeds, at the steps that all of them have; with one seed low and high are null.
    """
    frames = [
        _relative(comparison, variant, window)
        for variant in comparison.drawn
        if variant != comparison.baseline and comparison.curve_pairs(variant)
    ]
    return pl.concat(frames) if frames else pl.DataFrame()


def training_loss(comparison: Comparison, window: int) -> pl.DataFrame:
    """Return the smoothed training loss of each variant's first seed: variant, step, loss."""
    frames: list[pl.DataFrame] = []
    for variant in comparison.drawn:
        rows = training_rows(comparison.curves(variant)[0])
        curve = rows.select("step", loss=_smooth(rows["loss"], window))
        frames.append(_thinned(curve).select(pl.lit(variant).alias("variant"), pl.all()))
    return pl.concat(frames)


def training_rows(run: TrainedRun) -> pl.DataFrame:
    """Return a run's training steps in order, each once, as it was last written."""
    rows = run.metrics.filter(pl.col("kind") == "train", pl.col("step").is_not_null())
    return rows.unique("step", keep="last", maintain_order=True).sort("step")


def _relative(comparison: Comparison, variant: str, window: int) -> pl.DataFrame:
    pairs = comparison.curve_pairs(variant)
    curves: list[pl.DataFrame] = []
    for run, base in pairs:
        theirs = training_rows(base).select("step", base="loss")
        both = training_rows(run).join(theirs, on="step", maintain_order="left")
        gap = both.select(pl.col("loss") - pl.col("base")).to_series()
        curves.append(both.select("step", "tokens", difference=_smooth(gap, window)))
    gathered = (
        pl.concat(curves)
        .group_by("step", maintain_order=True)
        .agg(
            pl.col("tokens").first(),
            pl.col("difference"),
            seeds=pl.len(),
        )
        .filter(pl.col("seeds") == len(pairs))
        .sort("step")
    )
    curve = _thinned(gathered)
    found = [mean_and_error(values) for values in curve["difference"].to_list()]
    errors = [error if len(pairs) > 1 else None for _, error in found]
    return curve.with_columns(
        difference=pl.Series([mean for mean, _ in found], dtype=pl.Float64),
        error=pl.Series(errors, dtype=pl.Float64),
    ).select(
        pl.lit(variant).alias("variant"),
        "step",
        "tokens",
        "difference",
        low=pl.col("difference") - pl.col("error"),
        high=pl.col("difference") + pl.col("error"),
    )


def _smooth(losses: pl.Series, window: int) -> np.ndarray:
    """Return the trailing mean of the losses that are numbers; NaN where a window has none."""
    values = losses.fill_null(float("nan")).to_numpy()
    counted = np.isfinite(values)
    share = running_mean(counted, window)
    total = running_mean(np.where(counted, values, 0.0), window)
    return np.divide(total, share, out=np.full(len(values), np.nan), where=share > 0)


def _thinned(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a curve with at most so many of its points, the last among them."""
    every = max(1, -(-len(frame) // _MOST_POINTS))
    return frame[(len(frame) - 1) % every :: every]
