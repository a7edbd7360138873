"""What a run came to, as plain figures and as curves, whatever kind of run it was."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from wakeful.comparison.reading import TrainedRun
from wakeful.comparison.tables import training_rows
from wakeful.estimates import perplexity, weighted_mean
from wakeful.growth.outcome import Arm
from wakeful.probes.base import Frame, block_outputs

Curve = tuple[np.ndarray, np.ndarray]
"""Where it was measured, and what."""
_INCREASE = "increase_"
DOMAIN = "loss_"
"""Before a domain's name, what its loss is called."""
_DAMAGE = "damage_"
PICTURES = ("attention_picture", "mean_attention", "hidden_picture")
"""Metrics of `probes.patterns`: cells of a picture."""
_FORMER_NAMES = {
    "first_key_share_without_row_0": "first_key_share",
    "first_key_mass_with_row_0": "first_key_mass",
}
"""What older runs logged these figures as. Their means over layers count the embedding too."""


@dataclass(frozen=True)
class Seen:
    """One row of an exhibit with one seed."""

    figures: Mapping[str, float]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """`train_loss` and `validation_loss` by step, and `METRIC/VARIANT/POSITION` by layer."""
    pictures: Mapping[str, Frame] = field(default_factory=dict)
    """The rows of each of `PICTURES` that was looked at; "row,column" is their `position`."""


def figure(run: TrainedRun, name: str) -> float | None:
    """Return one figure of a run; None where the run did not measure it.

    `loss` and `perplexity` of the whole validation set, of a task `excess_loss`, and `loss_DOMAIN`
    of a part of a mixture;
    `increase_SCHEME`, its increase by quantization, and `damage_SCHEME`, that of the loss, in nats;
    `parameters`; `cache_bytes` a token; `steps_per_second`, `step_milliseconds`;
    `training_megabytes`, a GPU's peak, or else the weights, their gradients and the optimizer's
    state; and whatever `[train.diagnose]` logs, such as `kurtosis_rest`.
    """
    summary = run.summary
    if name.startswith(_INCREASE):
        return summary.quantization.get(name.removeprefix(_INCREASE), {}).get("increase")
    if name.startswith(_DAMAGE):
        return _damage(summary.quantization.get(name.removeprefix(_DAMAGE), {}))
    domains = summary.validation.domains or {}
    if name.startswith(DOMAIN) and name.removeprefix(DOMAIN) in domains:
        return domains[name.removeprefix(DOMAIN)]
    if name in _PLAIN:
        return _PLAIN[name](run)
    found = summary.diagnosis.get(name)
    return summary.diagnosis.get(_FORMER_NAMES.get(name, "")) if found is None else found


def counting_the_embedding(runs: tuple[TrainedRun, ...]) -> list[str]:
    """Return the variants with runs that logged means over layers with the embedding among them."""
    former = _FORMER_NAMES.values()
    found = (
        run.variant
        for run in runs
        if any(run.summary.diagnosis.get(name) is not None for name in former)
    )
    return list(dict.fromkeys(found))


def seen_of_run(
    run: TrainedRun, layers: Frame | None = None, answers: Mapping[str, float] | None = None
) -> Seen:
    """Return a finished training run's figures and curves, those of its layers if looked at.

    `answers` are its figures on tasks, by `answer_name`.
    """
    schemes = (
        f"{kind}{scheme}" for scheme in run.summary.quantization for kind in (_INCREASE, _DAMAGE)
    )
    domains = (f"{DOMAIN}{name}" for name in run.summary.validation.domains or {})
    names = [*_PLAIN, *run.summary.diagnosis, *schemes, *domains]
    figures = {name: value for name in names if (value := figure(run, name)) is not None}
    tokens = float(run.summary.tokens)
    figures |= {"tokens": tokens, "all_tokens": tokens, "seconds": run.summary.seconds}
    rows = training_rows(run).drop_nulls("loss")
    tests = run.metrics.filter(pl.col("kind") == "validation").unique("step", keep="last")
    tests = tests.sort("step").drop_nulls("loss")
    curves = {
        "train_loss": (rows["step"].to_numpy(), rows["loss"].to_numpy()),
        "validation_loss": (tests["step"].to_numpy(), tests["loss"].to_numpy()),
    }
    return _with_looks(figures | dict(answers or {}), curves, layers)


def answer_name(task: str, metric: str, shots: int = 0) -> str:
    """Return what a task's figure is called: `acc_piqa`, or `acc_average` of the average.

    With five shots it is `acc_mmlu_5_shots`.
    """
    name = f"{metric}_{'average' if task.startswith('average of ') else task}"
    return f"{name}_{shots}_shots" if shots else name


def seen_of_model(
    figures: Mapping[str, float], layers: Frame | None, answers: Mapping[str, float] | None = None
) -> Seen:
    """Return what a model that was not trained here showed."""
    return _with_looks({**figures, **(answers or {})}, {}, layers)


def train_curve(runs: Sequence[TrainedRun]) -> Curve:
    """Return the training loss over the steps of an arm's stages, one after another."""
    steps: list[np.ndarray] = []
    losses: list[np.ndarray] = []
    done = 0
    for run in runs:
        rows = training_rows(run).drop_nulls("loss")
        steps.append(rows["step"].to_numpy() + done)
        losses.append(rows["loss"].to_numpy())
        done += run.config.train.steps
    return np.concatenate(steps), np.concatenate(losses)


def seen_of_arm(
    arm: Arm,
    training: Curve,
    layers: Frame | None = None,
    answers: Mapping[str, float] | None = None,
) -> Seen:
    """Return the figures and curves of an heir or a baseline, as `seen_of_run`.

    `all_tokens` are the `tokens` with those of the rounds of growth before it.
    """
    figures = {
        "loss": arm.loss,
        "start_loss": arm.start_loss,
        "parameters": float(arm.parameters),
        "tokens": float(arm.tokens),
        "seconds": arm.seconds,
        "minus_reference": arm.minus_reference,
    }
    if arm.all_tokens is not None:
        figures["all_tokens"] = float(arm.all_tokens)
    last = {point.step: point.loss for point in arm.curve}
    steps = np.array(sorted(last), dtype=np.float64)
    curve = np.array([last[step] for step in sorted(last)])
    curves = {"train_loss": training, "validation_loss": (steps, curve)}
    return _with_looks(figures | dict(answers or {}), curves, layers)


def _with_looks(
    figures: Mapping[str, float], curves: Mapping[str, Curve], layers: Frame | None
) -> Seen:
    if layers is None:
        return Seen(figures, curves)
    pictures = {name: layers.filter(pl.col("metric") == name) for name in PICTURES}
    found = {name: rows for name, rows in pictures.items() if rows.height}
    return Seen(figures, {**curves, **of_layers(layers)}, found)


def of_layers(frame: Frame) -> dict[str, Curve]:
    """Return each metric of layers, `METRIC/VARIANT/POSITION`, by the layer's number from 1.

    `near_rank_1_share` is `near_rank_1`, which counts heads, over the heads that have a rank.
    """
    rows = block_outputs(frame).filter(pl.col("head").is_null())
    found: dict[str, Curve] = {}
    for key, part in rows.group_by("metric", "variant", "position", maintain_order=True):
        measured = part.drop_nulls("value").sort("layer")
        layers = measured["layer"].to_numpy() + 1
        found["/".join(map(str, key))] = (layers, measured["value"].to_numpy())
    heads = frame.filter(metric="rank").drop_nulls("head")["head"].n_unique()
    if heads and "near_rank_1/paper/all" in found:
        layers, counts = found["near_rank_1/paper/all"]
        found["near_rank_1_share/paper/all"] = (layers, counts / heads)
    return found


def _loss(run: TrainedRun) -> float:
    return weighted_mean(run.validation["loss"], run.validation["tokens"])[0]


def _steps_per_second(run: TrainedRun) -> float:
    tokens_a_step = run.config.train.batch_size * run.config.train.length
    return run.summary.tokens_per_second / tokens_a_step


def _step_milliseconds(run: TrainedRun) -> float | None:
    rate = _steps_per_second(run)
    return 1000 / rate if rate > 0 else None


def _damage(found: Mapping[str, float | None]) -> float | None:
    """Return ln (perplexity / perplexity in full precision)."""
    quantized, more = found.get("perplexity"), found.get("increase")
    if quantized is None or more is None or not quantized - more > 0:
        return None
    return math.log(quantized / (quantized - more))


def _megabytes(sizes: Mapping[str, int]) -> float | None:
    if "peak" in sizes:
        return sizes["peak"] / 1e6
    if not {"weights", "optimizer"} <= sizes.keys():
        return None
    # A gradient takes what its weight does.
    return (2 * sizes["weights"] + sizes["optimizer"]) / 1e6


_PLAIN: dict[str, Callable[[TrainedRun], float | None]] = {
    "loss": _loss,
    "perplexity": lambda run: perplexity(_loss(run)),
    "excess_loss": lambda run: run.summary.validation.excess_loss,
    "parameters": lambda run: float(run.summary.parameters.total),
    "cache_bytes": lambda run: float(run.summary.kv_cache_bytes_per_token),
    "steps_per_second": _steps_per_second,
    "step_milliseconds": _step_milliseconds,
    "training_megabytes": lambda run: _megabytes(run.summary.bytes),
}
