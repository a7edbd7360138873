"""Run directories as tidy tables."""

import math
from typing import Any

import numpy as np
import polars as pl

from wakeful.estimates import Estimate, mean_and_error, paired_ratio, perplexity, weighted_mean
from wakeful.pages.comparison.curves import relative_training_loss, training_loss, training_rows
from wakeful.pages.comparison.reading import Comparison, TrainedRun, read_comparison, read_run

__all__ = [
    "Comparison",
    "TrainedRun",
    "paired_difference",
    "pairs_counted",
    "read_comparison",
    "read_run",
    "relative_training_loss",
    "summary_table",
    "training_loss",
    "training_rows",
]


def summary_table(comparison: Comparison) -> pl.DataFrame:
    """Return one row a variant: losses, paired differences, size, cache and speed.

    Losses are in nats a token, over the seeds that the difference is over too: those that the
    variant shares with the baseline (`seeds` of them, named in `seeds_used`). Of several seeds a
    loss is the mean, and its error and the difference's are over seeds; of one they are over
    validation windows: `paired_over` says which. Perplexity is e to the loss, so with several seeds
    their geometric mean. Columns that end in `_ratio` are ratios to the baseline, null where the
    baseline's figure is zero.
    """
    rows: list[dict[str, Any]] = []
    for variant in comparison.variants:
        runs = comparison.compared(variant)
        loss, error = _loss(runs)
        difference, difference_error = paired_difference(comparison, variant)
        first = runs[0].summary
        rows.append(
            {
                "variant": variant,
                "seeds": len(runs),
                "seeds_used": ", ".join(str(run.seed) for run in runs),
                "loss": loss,
                "loss_error": error,
                "difference": difference,
                "difference_error": difference_error,
                "paired_over": comparison.paired_over(variant),
                "perplexity": perplexity(loss),
                "parameters": first["parameters"]["total"],
                "cache_bytes": first["kv_cache_bytes_per_token"],
                "tokens_per_second": float(
                    np.median([run.summary["tokens_per_second"] for run in runs])
                ),
                "seconds": float(np.mean([run.summary["seconds"] for run in runs])),
            }
        )
    return pl.DataFrame(rows).with_columns(
        parameters_ratio=_ratio("parameters"),
        cache_ratio=_ratio("cache_bytes"),
        speed_ratio=_ratio("tokens_per_second"),
    )


def paired_difference(comparison: Comparison, variant: str) -> Estimate:
    """Return the variant's final validation loss minus the baseline's, paired, with its error.

    Over seeds, d_s = loss of the variant − loss of the baseline with seed s: mean and s / √n of the
    d_s (`mean_and_error`). Over the windows of one seed: `paired_ratio`. NaN if they share no seed.
    """
    if variant == comparison.baseline:
        return 0.0, 0.0
    pairs = comparison.pairs(variant)
    if not pairs:
        return math.nan, math.nan
    if len(pairs) > 1:
        return mean_and_error([_run_loss(run)[0] - _run_loss(base)[0] for run, base in pairs])
    run, base = (one.validation for one in pairs[0])
    return paired_ratio(run["loss"], base["loss"], run["tokens"])


def pairs_counted(comparison: Comparison, variant: str) -> int:
    """Return how many pairs a variant's difference is the mean of: seeds, or windows of one."""
    pairs = comparison.pairs(variant)
    return len(pairs[0][0].validation) if len(pairs) == 1 else len(pairs)


def _run_loss(run: TrainedRun) -> Estimate:
    return weighted_mean(run.validation["loss"], run.validation["tokens"])


def _loss(runs: list[TrainedRun]) -> Estimate:
    if len(runs) > 1:
        return mean_and_error([_run_loss(run)[0] for run in runs])
    return _run_loss(runs[0])


def _ratio(column: str) -> pl.Expr:
    first = pl.col(column).first()
    return pl.when(first > 0).then(pl.col(column) / first)
