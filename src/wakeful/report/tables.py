"""Run directories as tidy tables."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from wakeful.config import Config
from wakeful.errors import WakefulError
from wakeful.run import Run
from wakeful.statistics import Estimate, mean_and_error, ratio_and_error, running_mean


@dataclass(frozen=True)
class TrainedRun:
    """What one finished run left behind."""

    path: Path
    variant: str
    seed: int
    config: Config
    header: dict[str, Any]
    environment: dict[str, Any]
    summary: dict[str, Any]
    metrics: pl.DataFrame
    validation: pl.DataFrame
    """One row a validation window: window, loss (mean nats a token), tokens."""


@dataclass(frozen=True)
class Comparison:
    """Runs of several variants, the first of which is the baseline."""

    name: str
    variants: tuple[str, ...]
    runs: tuple[TrainedRun, ...]
    unfinished: tuple[str, ...] = field(default=())

    @property
    def baseline(self) -> str:
        """The variant that differences are taken from."""
        return self.variants[0]

    def of(self, variant: str) -> list[TrainedRun]:
        """Return a variant's runs by seed."""
        return sorted((r for r in self.runs if r.variant == variant), key=lambda run: run.seed)

    @cached_property
    def paired_over(self) -> str:
        """What differences are paired over: "seeds" where every variant shares two or more."""
        return "seeds" if all(len(self._shared_seeds(v)) > 1 for v in self.variants) else "windows"

    def pairs(self, variant: str) -> list[tuple[TrainedRun, TrainedRun]]:
        """Return (run, baseline run) for each seed that both have."""
        mine = {run.seed: run for run in self.of(variant)}
        base = {run.seed: run for run in self.of(self.baseline)}
        return [(mine[seed], base[seed]) for seed in self._shared_seeds(variant)]

    def _shared_seeds(self, variant: str) -> list[int]:
        base = {run.seed for run in self.of(self.baseline)}
        return sorted(base & {run.seed for run in self.of(variant)})


def read_run(path: str | Path, variant: str = "") -> TrainedRun:
    """Read one finished training run."""
    run = Run.open(path)
    config = run.config
    return TrainedRun(
        path=run.path,
        variant=variant or config.name,
        seed=config.train.seed,
        config=config,
        header=run.header,
        environment=run.read_json("environment.json"),
        summary=run.read_json("summary.json"),
        metrics=_read_parquet(run.path / "metrics.parquet", ("kind", "step", "loss")),
        validation=_read_parquet(run.path / "validation.parquet", ("window", "loss", "tokens")),
    )


def read_comparison(source: str | Path | Sequence[str | Path]) -> Comparison:
    """Read a comparison folder, one run, or several runs of which the first is the baseline.

    Runs that are not finished are left out and named in `unfinished`.
    """
    if isinstance(source, str | Path):
        header = Run.open(source).header
        if header.get("kind") == "compare":
            return _comparison_folder(Path(source), header)
        source = [source]
    runs = [read_run(path) for path in source]
    variants = tuple(dict.fromkeys(run.variant for run in runs))
    if len({(run.variant, run.seed) for run in runs}) < len(runs):
        raise WakefulError(
            "two of the runs have the same name and seed; give them different names with --name"
        )
    return _checked(Comparison(Path(source[0]).name, variants, tuple(runs)))


def summary_table(comparison: Comparison) -> pl.DataFrame:
    """Return one row a variant: losses, paired differences, size, cache and speed.

    Losses are in nats a token. With several seeds a loss is the mean over seeds; its error and the
    difference's are over seeds. With one seed they are over validation windows.
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
                "perplexity": math.exp(loss),
                "parameters": first["parameters"]["total"],
                "cache_bytes": first["kv_cache_bytes_per_token"],
                "tokens_per_second": float(
                    np.median([run.summary["tokens_per_second"] for run in runs])
                ),
                "seconds": float(np.mean([run.summary["seconds"] for run in runs])),
            }
        )
    return pl.DataFrame(rows)


def paired_difference(comparison: Comparison, variant: str) -> Estimate:
    """Return the variant's final validation loss minus the baseline's, paired, with its error."""
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


def relative_training_loss(comparison: Comparison, window: int) -> pl.DataFrame:
    """Return the smoothed training loss minus the baseline's at each step (fig. 1 of the paper).

    Columns: variant, step, tokens, difference, low, high; the band is ± one standard error over
    seeds and as wide as nothing with one seed. Smoothing is a running mean over the last `window`
    steps, as the paper's over 10 or 100.
    """
    frames: list[pl.DataFrame] = []
    for variant in comparison.variants[1:]:
        curves: list[np.ndarray] = []
        steps = tokens = np.zeros(0)
        for run, base in comparison.pairs(variant):
            mine, theirs = training_rows(run), training_rows(base)
            size = min(len(mine), len(theirs))
            gap = mine["loss"].to_numpy()[:size] - theirs["loss"].to_numpy()[:size]
            curves.append(running_mean(gap, window))
            steps, tokens = mine["step"].to_numpy(), mine["tokens"].to_numpy()
        if not curves:
            continue
        size = min(len(curve) for curve in curves)
        stacked = np.stack([curve[:size] for curve in curves])
        mean = stacked.mean(0)
        error = stacked.std(0, ddof=1) / len(curves) ** 0.5 if len(curves) > 1 else 0 * mean
        frames.append(
            _thinned(
                {
                    "step": steps[:size],
                    "tokens": tokens[:size],
                    "difference": mean,
                    "low": mean - error,
                    "high": mean + error,
                }
            ).select(pl.lit(variant).alias("variant"), pl.all())
        )
    return pl.concat(frames) if frames else pl.DataFrame()


def training_loss(comparison: Comparison, window: int) -> pl.DataFrame:
    """Return the smoothed training loss of each variant's first seed: variant, step, loss."""
    frames = []
    for variant in comparison.variants:
        rows = training_rows(comparison.of(variant)[0])
        smooth = running_mean(rows["loss"].to_numpy(), window)
        curve = _thinned({"step": rows["step"].to_numpy(), "loss": smooth})
        frames.append(curve.select(pl.lit(variant).alias("variant"), pl.all()))
    return pl.concat(frames)


def _thinned(curve: dict[str, np.ndarray], most: int = 1000) -> pl.DataFrame:
    """Return a smoothed curve with at most so many of its points, the last among them."""
    frame = pl.DataFrame(curve)
    every = -(-len(frame) // most)
    return frame[(len(frame) - 1) % every :: every]


def training_rows(run: TrainedRun) -> pl.DataFrame:
    """Return a run's training steps in order."""
    return run.metrics.filter(pl.col("kind") == "train").sort("step")


def _run_loss(run: TrainedRun) -> Estimate:
    tokens = run.validation["tokens"].to_numpy()
    return ratio_and_error(run.validation["loss"].to_numpy() * tokens, tokens)


def _loss(comparison: Comparison, runs: list[TrainedRun]) -> Estimate:
    if len(runs) > 1 and comparison.paired_over == "seeds":
        return mean_and_error([_run_loss(run)[0] for run in runs])
    return _run_loss(runs[0])


def _comparison_folder(path: Path, header: dict[str, Any]) -> Comparison:
    runs: list[TrainedRun] = []
    unfinished: list[str] = []
    for variant in header["variants"]:
        for seed in header["seeds"]:
            place = path / variant / f"seed-{seed}"
            if (place / "run.json").is_file() and Run.open(place).header["status"] == "done":
                runs.append(read_run(place, variant))
            else:
                unfinished.append(f"{variant}, seed {seed}")
    variants = tuple(v for v in header["variants"] if any(run.variant == v for run in runs))
    if header["baseline"] not in variants:
        raise WakefulError(
            f"{path} has no finished run of its baseline {header['baseline']!r}; continue the "
            "comparison with --resume"
        )
    return _checked(Comparison(header["name"], variants, tuple(runs), tuple(unfinished)))


def _checked(comparison: Comparison) -> Comparison:
    """Refuse runs whose losses cannot be paired."""
    first = comparison.runs[0]
    for run in comparison.runs[1:]:
        for key in ("corpus_sha256", "tokenizer", "validation_tokens"):
            if run.summary["data"][key] != first.summary["data"][key]:
                raise WakefulError(
                    f"{run.path} and {first.path} cannot be compared: their {key} differs"
                )
        if not run.validation["tokens"].equals(first.validation["tokens"]):
            raise WakefulError(
                f"{run.path} and {first.path} cannot be compared: their validation windows differ "
                "(train.length must be the same)"
            )
    return comparison


def _read_parquet(path: Path, columns: tuple[str, ...]) -> pl.DataFrame:
    try:
        frame = pl.read_parquet(path)
    except FileNotFoundError:
        raise WakefulError(f"{path} is missing: the run is not finished") from None
    except (pl.exceptions.PolarsError, OSError) as error:
        raise WakefulError(f"{path} cannot be read: {error}") from None
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise WakefulError(f"{path} has no column {missing[0]!r}")
    return frame
