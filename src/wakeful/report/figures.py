"""The figures of a finished run by name, for tables laid out as a paper's."""

import math

from wakeful.report.reading import TrainedRun

_INCREASE = "increase_"


def figure(run: TrainedRun, name: str) -> float | None:
    """Return one figure of a run; None where the run did not measure it.

    `perplexity` of the whole validation set; `increase_SCHEME`, its increase by quantisation;
    `steps_per_second`; `training_megabytes`, a GPU's peak, or else the weights, their gradients
    and the optimizer's state; and whatever `[train.diagnose]` logs, such as `kurtosis_rest`.
    """
    if name == "perplexity":
        return math.exp(min(run.summary["validation"]["loss"], 700.0))
    if name.startswith(_INCREASE):
        found = run.summary.get("quantization", {}).get(name.removeprefix(_INCREASE), {})
        return _number(found.get("increase"))
    if name == "steps_per_second":
        tokens = run.config.train.batch_size * run.config.train.length
        return run.summary["tokens_per_second"] / tokens
    if name == "training_megabytes":
        sizes = run.summary.get("bytes", {})
        if "peak" in sizes:
            return sizes["peak"] / 1e6
        # A gradient takes what its weight does.
        return (2 * sizes["weights"] + sizes["optimizer"]) / 1e6 if sizes else None
    return _number(run.summary.get("diagnosis", {}).get(name))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
