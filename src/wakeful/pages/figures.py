"""The figures of a finished run by name, for tables laid out as a paper's."""

import math
from collections.abc import Mapping
from typing import Any

from wakeful.estimates import ratio_and_error
from wakeful.pages.reading import TrainedRun

_INCREASE = "increase_"


def figure(run: TrainedRun, name: str) -> float | None:
    """Return one figure of a run; None where the run did not measure it.

    `perplexity` of the whole validation set; `increase_SCHEME`, its increase by quantisation;
    `steps_per_second`; `training_megabytes`, a GPU's peak, or else the weights, their gradients
    and the optimizer's state; and whatever `[train.diagnose]` logs, such as `kurtosis_rest`.
    """
    if name == "perplexity":
        tokens = run.validation["tokens"].to_numpy()
        loss, _ = ratio_and_error(run.validation["loss"].to_numpy() * tokens, tokens)
        return math.exp(loss) if loss < 700 else math.inf
    if name.startswith(_INCREASE):
        return _read(run.summary, "quantization", name.removeprefix(_INCREASE), "increase")
    if name == "steps_per_second":
        tokens_a_step = run.config.train.batch_size * run.config.train.length
        return run.summary["tokens_per_second"] / tokens_a_step
    if name == "training_megabytes":
        return _megabytes(run.summary)
    return _read(run.summary, "diagnosis", name)


def _megabytes(summary: Mapping[str, Any]) -> float | None:
    peak = _read(summary, "bytes", "peak")
    if peak is not None:
        return peak / 1e6
    weights, state = (_read(summary, "bytes", part) for part in ("weights", "optimizer"))
    # A gradient takes what its weight does.
    return None if weights is None or state is None else (2 * weights + state) / 1e6


def _read(table: Mapping[str, Any], *keys: str) -> float | None:
    """Return the finite number at the end of a path of keys, if there is one."""
    value: object = table
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf:
        return float(value)
    return None
