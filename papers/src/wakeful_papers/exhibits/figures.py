"""Measurements of training runs and of heirs: plain figures, and curves over steps or layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from wakeful.inheritance.outcome import Arm
from wakeful.probes.base import Frame, block_outputs
from wakeful.training.compared import TrainedRun
from wakeful.training.tables import training_rows
from wakeful_papers.exhibits.run_figures import DAMAGE, DOMAIN, INCREASE, PLAIN, run_figure

Curve = tuple[np.ndarray, np.ndarray]
"""Steps or layers, and the values at them."""
PICTURES = ("attention_picture", "mean_attention", "hidden_picture")
"""Metrics of `probes.pictures`, whose rows are the cells of a picture."""


@dataclass(frozen=True)
class Measurement:
    """The figures, curves and pictures of one row of an exhibit with one seed."""

    figures: Mapping[str, float]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """`train_loss` and `validation_loss` by step, and `METRIC/VARIANT/POSITION` by layer."""
    pictures: Mapping[str, Frame] = field(default_factory=dict)
    """The rows of each of `PICTURES` that was measured; their `position` is "row,column"."""

    def with_probes(self, layers: Frame | None, task_figures: Mapping[str, float]) -> "Measurement":
        """Return a measurement with the rows `layers` of probes too, None if there are none, and
        with figures on tasks, by their names (`task_figure_name`).
        """
        figures = {**self.figures, **task_figures}
        if layers is None:
            return Measurement(figures, self.curves)
        pictures = {name: layers.filter(pl.col("metric") == name) for name in PICTURES}
        pictures = {name: rows for name, rows in pictures.items() if rows.height}
        return Measurement(figures, {**self.curves, **layer_curves(layers)}, pictures)


def measure_run(run: TrainedRun) -> Measurement:
    """Return a finished training run's figures and curves."""
    schemes = (
        f"{kind}{scheme}" for scheme in run.summary.quantization for kind in (INCREASE, DAMAGE)
    )
    domains = (f"{DOMAIN}{name}" for name in run.summary.validation.domains or {})
    names = [*PLAIN, *run.summary.diagnosis, *schemes, *domains]
    figures = {name: value for name in names if (value := run_figure(run, name)) is not None}
    tokens = float(run.summary.tokens)
    figures |= {"tokens": tokens, "all_tokens": tokens, "seconds": run.summary.seconds}
    curves = {"train_loss": train_curve([run]), "validation_loss": validation_curve(run)}
    return Measurement(figures, curves)


def validation_curve(run: TrainedRun) -> Curve:
    """Return the validation loss by step; if a step was logged twice, its last value."""
    rows = run.metrics.filter(pl.col("kind") == "validation").unique("step", keep="last")
    rows = rows.sort("step").drop_nulls("loss")
    return rows["step"].to_numpy(), rows["loss"].to_numpy()


def task_figure_name(task: str, metric: str, shots: int = 0) -> str:
    """Return a figure's name: `acc_piqa`, `acc_mmlu_5_shots`, or `acc_average` over all tasks."""
    name = f"{metric}_{task}"
    return f"{name}_{shots}_shots" if shots else name


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


def measure_arm(arm: Arm, training: Curve) -> Measurement:
    """Return the figures of an heir or a baseline, and the curves of its two losses.

    The figure `all_tokens` includes those of the rounds of growth before it.
    """
    figures = {
        "loss": arm.loss,
        "start_loss": arm.start_loss,
        "parameters": float(arm.parameters),
        "tokens": float(arm.tokens),
        "all_tokens": float(arm.all_tokens),
        "seconds": arm.seconds,
        "minus_reference": arm.minus_reference,
    }
    last = {point.step: point.loss for point in arm.curve}
    steps = np.array(sorted(last), dtype=np.float64)
    curve = np.array([last[step] for step in sorted(last)])
    return Measurement(figures, {"train_loss": training, "validation_loss": (steps, curve)})


def layer_curves(frame: Frame) -> dict[str, Curve]:
    """Return each metric of layers as a curve `METRIC/VARIANT/POSITION` over layer numbers from 1.

    `near_rank_1_share` is `near_rank_1`, a number of heads, over the number of heads with a rank.
    """
    rows = block_outputs(frame).filter(pl.col("head").is_null())
    curves: dict[str, Curve] = {}
    for key, part in rows.group_by("metric", "variant", "position", maintain_order=True):
        measured = part.drop_nulls("value").sort("layer")
        layers = measured["layer"].to_numpy() + 1
        curves["/".join(map(str, key))] = (layers, measured["value"].to_numpy())
    heads = frame.filter(metric="rank").drop_nulls("head")["head"].n_unique()
    if heads and "near_rank_1/paper/all" in curves:
        layers, counts = curves["near_rank_1/paper/all"]
        curves["near_rank_1_share/paper/all"] = (layers, counts / heads)
    return curves
