"""Figures of a diagnosis, measured during training."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl
import torch
from jaxtyping import Int
from torch import Tensor

from wakeful.data.order import ValidationWindows
from wakeful.model.decoder import IGNORED, Decoder
from wakeful.model.evaluating import evaluating
from wakeful.probes.attention import BosMass, Entropy, Sinks, Values
from wakeful.probes.base import Frame, Probe, mean_over_layers
from wakeful.probes.hidden import Outliers, Smoothing
from wakeful.probes.rank import Ranks
from wakeful.probes.watch import watch
from wakeful.runs.run import TRAJECTORIES, Run
from wakeful.training.parallel import Parallel
from wakeful.training.setup import NO_AUTOCAST, Training

DIAGNOSED_METRICS = {
    **{
        name: (name, "paper", "all")
        for part in ("share", "mass")
        for name in (f"first_key_{part}_with_row_0", f"first_key_{part}_without_row_0")
    },
    "entropy": ("entropy", "code", "all"),
    "rank": ("rank", "paper", "all"),
    "near_rank_1": ("near_rank_1", "paper", "all"),
    "lazy": ("lazy", "paper", "all"),
    "bos_mass_trigger": ("bos_mass", "paper", "trigger"),
    "bos_mass_other": ("bos_mass", "paper", "other"),
    "value_drain": ("value_drain", "paper", "first"),
    "residual_peak": ("residual_peak", "paper", "first"),
    "kurtosis_first": ("kurtosis", "paper", "first"),
    "kurtosis_rest": ("kurtosis", "paper", "rest"),
    "max_activation_first": ("max_activation", "paper", "first"),
    "max_activation_rest": ("max_activation", "paper", "rest"),
}
"""Metric, variant and position of each figure that a run logs, as docs/metrics.md defines them."""


PER_HEAD_METRICS = ("bos_mass", "value_drain", "residual_peak")
"""Metrics that a run logs for each layer and head with `train.diagnose.heads`."""

_AT_ONCE = 2**15
"""Most tokens of one pass that probes watch, for their memory."""


@torch.no_grad()
def diagnose_windows(
    model: Decoder | Parallel,
    windows: ValidationWindows,
    num_sequences: int,
    more: Sequence[Probe] = (),
    *,
    ranks: bool = True,
    autocast: contextlib.AbstractContextManager[object] = NO_AUTOCAST,
) -> Frame:
    """Run the probes of `DIAGNOSED_METRICS` and those in `more` over the first `num_sequences`
    validation windows that have no padding; return the probes' rows, sorted by layer.

    Without `ranks`, the singular-value ranks, which take longer than all other figures, are left
    out. Every process calls it, and measures the same.
    """
    parallel = model if isinstance(model, Parallel) else Parallel(model)
    decoder = parallel.decoder
    device = decoder.head.weight.device
    sequences = torch.cat(whole_windows(windows, num_sequences))
    triggers = windows.token_file.is_trigger(sequences.numpy())
    bos = BosMass()
    rank_probes = [Ranks()] if ranks else []
    probes = Sinks(), bos, Entropy(), *rank_probes, Values(curve=1), Outliers(), Smoothing(), *more
    batch_size = max(1, _AT_ONCE // sequences.shape[1])
    with evaluating(decoder), autocast, watch(decoder, *probes) as watcher:
        for start in range(0, len(sequences), batch_size):
            part = slice(start, start + batch_size)
            # The positions at which a synthetic task asks for a copy; text has none.
            bos.triggers = None if triggers is None else torch.from_numpy(triggers[part])
            parallel.call(decoder.hidden, sequences[part].to(device))
    parallel.settle()  # frees weights that the calls have gathered
    return watcher.frame.sort("layer", maintain_order=True)


def whole_windows(windows: ValidationWindows, number: int) -> list[Int[Tensor, "1 L"]]:
    """Return the inputs of the first `number` windows that have no padding, each (1, L), or of the
    first window if all have padding.
    """
    # A window is padded at its end, with targets that are not counted.
    unpadded = (inputs for inputs, targets in window_rows(windows) if targets[0, -1] != IGNORED)
    return list(itertools.islice(unpadded, number)) or [windows.batch(0)[0][:1]]


def window_rows(
    windows: ValidationWindows, number: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets), each (1, L), of the first `number` windows; None means all."""
    rows = (
        row
        for inputs, targets in windows  # batches of windows
        for row in zip(inputs.split(1), targets.split(1), strict=True)
    )
    return itertools.islice(rows, number)


def figures(rows: Frame) -> dict[str, float]:
    """Return the mean over layers of each figure of `DIAGNOSED_METRICS`, by its name there.

    A figure is one metric, in one variant, at one position of tokens. `rows` are those of probes;
    the rows of single heads do not count. Means that are missing or not finite are left out.
    """
    means: dict[str, float] = {}
    for name, (metric, variant, position) in DIAGNOSED_METRICS.items():
        layer_rows = rows.filter(
            pl.col("head").is_null(), metric=metric, variant=variant, position=position
        )
        mean = mean_over_layers(layer_rows)
        if mean is not None and math.isfinite(mean):
            means[name] = mean
    return means


def record_diagnosis(training: Training, step: int) -> None:
    """Measure the figures of `train.diagnose` after a step and record them.

    The means over layers go to metrics.jsonl and the trackers, except before the first step (0).
    With `train.diagnose.heads`, each head's figures go to trajectories.jsonl.
    """
    settings, run = training.config.train.diagnose, training.run
    probe_rows = diagnose_windows(
        training.parallel, training.windows, settings.num_sequences, autocast=training.probe_context
    )
    if settings.heads:
        run.append(*_trajectory_rows(probe_rows, step), log="trajectories.jsonl")
    if step:
        row = {"kind": "diagnosis", "step": step, **figures(probe_rows)}
        run.append(row)
        training.write(row)


def logged_diagnosis(run: Run, step: int) -> dict[str, float]:
    """Return the figures of the diagnosis after a step, by name, as logged; {} if there is none.

    A resumed run may have logged a diagnosis again: the last one counts.
    """
    diagnosis: dict[str, float] = {}
    for row in run.metrics():
        if (row["kind"], row["step"]) == ("diagnosis", step):
            diagnosis = {name: value for name, value in row.items() if name not in ("kind", "step")}
    return diagnosis


def _trajectory_rows(frame: Frame, step: int) -> list[dict[str, Any]]:
    """Return the rows of trajectories.jsonl: figures of `PER_HEAD_METRICS` after a step."""
    columns = list(TRAJECTORIES)[1:]  # all but the step
    rows = frame.filter(frame["metric"].is_in(PER_HEAD_METRICS)).select(columns)
    return [{"kind": "figure", "step": step, **row} for row in rows.iter_rows(named=True)]
