"""The figures of a training run, by name."""

import math
from collections.abc import Callable, Mapping

from wakeful.estimates import perplexity
from wakeful.training.compared import TrainedRun
from wakeful.training.validation import mean_loss

INCREASE = "increase_"
DOMAIN = "loss_"
"""Prefix of the name of a domain's loss."""
DAMAGE = "damage_"


def run_figure(run: TrainedRun, name: str) -> float | None:
    """Return a figure of a run by its name; None if the run did not measure it.

    Names: `loss` and `perplexity` of the validation set, `excess_loss` of a task, `loss_DOMAIN` of
    a part of a mixture; under a quantization scheme `increase_SCHEME` of the perplexity and
    `damage_SCHEME` of the loss, in nats; `parameters`; `cache_bytes` per token;
    `steps_per_second`, `step_milliseconds`; `training_megabytes` (a GPU's peak, or else weights,
    gradients and optimizer state); and what `[train.diagnose]` logs, such as `kurtosis_rest`.
    """
    summary = run.summary
    if name.startswith(INCREASE):
        return summary.quantization.get(name.removeprefix(INCREASE), {}).get("increase")
    if name.startswith(DAMAGE):
        return _damage(summary.quantization.get(name.removeprefix(DAMAGE), {}))
    domains = summary.validation.domains or {}
    if name.startswith(DOMAIN) and name.removeprefix(DOMAIN) in domains:
        return domains[name.removeprefix(DOMAIN)]
    if name in PLAIN:
        return PLAIN[name](run)
    return summary.diagnosis.get(name)


def _steps_per_second(run: TrainedRun) -> float:
    tokens_per_step = run.config.train.batch_size * run.config.train.length
    return run.summary.tokens_per_second / tokens_per_step


def _step_milliseconds(run: TrainedRun) -> float | None:
    rate = _steps_per_second(run)
    return 1000 / rate if rate > 0 else None


def _damage(figures: Mapping[str, float | None]) -> float | None:
    """Return ln (perplexity / perplexity in full precision)."""
    quantized, increase = figures.get("perplexity"), figures.get("increase")
    if quantized is None or increase is None or not quantized - increase > 0:
        return None
    return math.log(quantized / (quantized - increase))


def _megabytes(sizes: Mapping[str, int]) -> float | None:
    if "peak" in sizes:
        return sizes["peak"] / 1e6
    if not {"weights", "optimizer"} <= sizes.keys():
        return None
    # A gradient takes as much memory as its weight.
    return (2 * sizes["weights"] + sizes["optimizer"]) / 1e6


PLAIN: dict[str, Callable[[TrainedRun], float | None]] = {
    "loss": lambda run: mean_loss(run.validation)[0],
    "perplexity": lambda run: perplexity(mean_loss(run.validation)[0]),
    "excess_loss": lambda run: run.summary.validation.excess_loss,
    "parameters": lambda run: float(run.summary.parameters.total),
    "cache_bytes": lambda run: float(run.summary.kv_cache_bytes_per_token),
    "steps_per_second": _steps_per_second,
    "step_milliseconds": _step_milliseconds,
    "training_megabytes": lambda run: _megabytes(run.summary.bytes),
}
