"""Run directories as tidy tables."""

import math
from typing import Any

import numpy as np
import polars as pl

from wakeful.estimates import Estimate, mean_and_error, ratio_and_error
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

    Losses are in nats a token. With several seeds a loss is the mean over seeds; its error and the
    difference's are over seeds. With one seed they are over validation windows: `paired_over` says
    which. Perplexity is e to the loss, so with several seeds their geometric mean. Columns that end
    in `_ratio` are ratios to the baseline, null where the baseline's figure is zero.
    """
    rows: list[dict[str, Any]] = []
    for variant in comparison.variants:
        runs = comparison.of(variant)
        loss, error = _loss(comparison, runs)
        difference, difference_error = paired_difference(comparison, variant)
        first = runs[0].summary
        rows.append(
            {
                "variant": variant,
                "seeds": len(runs),
                "loss": loss,
                "loss_error": error,
                "difference": difference,
                "difference_error": difference_error,
                "paired_over": comparison.paired_over,
                "perplexity": math.exp(loss) if loss < 700 else math.inf,
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
    d_s. Over the windows of one seed, with m_w tokens and a gap of g_w nats a token in window w:
    r = Σ m_w g_w / Σ m_w, error √(n/(n−1) Σ (m_w (g_w − r))²) / Σ m_w. NaN if they share no seed.
    """
    if variant == comparison.baseline:
        return 0.0, 0.0
    pairs = comparison.pairs(variant)
    if not pairs:
        return math.nan, math.nan
    if comparison.paired_over == "seeds":
        return mean_and_error([_run_loss(run)[0] - _run_loss(base)[0] for run, base in pairs])
    run, base = pairs[0]
    tokens = run.validation["tokens"].to_numpy()
    gaps = run.validation["loss"].to_numpy() - base.validation["loss"].to_numpy()
    return ratio_and_error(gaps * tokens, tokens)


def pairs_counted(comparison: Comparison, variant: str) -> int:
    """Return how many pairs a variant's difference is the mean of: seeds, or windows of one."""
    pairs = comparison.pairs(variant)
    if comparison.paired_over == "seeds" or not pairs:
        return len(pairs)
    return len(pairs[0][0].validation)


def _run_loss(run: TrainedRun) -> Estimate:
    tokens = run.validation["tokens"].to_numpy()
    return ratio_and_error(run.validation["loss"].to_numpy() * tokens, tokens)


def _loss(comparison: Comparison, runs: list[TrainedRun]) -> Estimate:
    if len(runs) > 1 and comparison.paired_over == "seeds":
        return mean_and_error([_run_loss(run)[0] for run in runs])
    return _run_loss(runs[0])


def _ratio(column: str) -> pl.Expr:
    first = pl.col(column).first()
    return pl.when(first > 0).then(pl.col(column) / first)
