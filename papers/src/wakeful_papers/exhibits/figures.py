"""What a run came to, as plain figures and as curves, whatever kind of run it was."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from wakeful.inheritance.outcome import Arm
from wakeful.probes.base import Frame, block_outputs
from wakeful.training.compared import TrainedRun
from wakeful.training.tables import training_rows
from wakeful_papers.exhibits.run_figures import DAMAGE, DOMAIN, INCREASE, PLAIN, figure_of

Curve = tuple[np.ndarray, np.ndarray]
"""Where it was measured, and what."""
PICTURES = ("attention_picture", "mean_attention", "hidden_picture")
"""Metrics of `probes.pictures`: cells of a picture."""


@dataclass(frozen=True)
class SeenRow:
    """One row of an exhibit with one seed."""

    figures: Mapping[str, float]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """`train_loss` and `validation_loss` by step, and `METRIC/VARIANT/POSITION` by layer."""
    pictures: Mapping[str, Frame] = field(default_factory=dict)
    """The rows of each of `PICTURES` that was looked at; "row,column" is their `position`."""

    def besides(self, layers: Frame | None, answers: Mapping[str, float]) -> "SeenRow":
        """Return it with what its layers showed if they were looked at, and its figures on tasks by
        `answer_name`.
        """
        figures = {**self.figures, **answers}
        if layers is None:
            return SeenRow(figures, self.curves)
        pictures = {name: layers.filter(pl.col("metric") == name) for name in PICTURES}
        found = {name: rows for name, rows in pictures.items() if rows.height}
        return SeenRow(figures, {**self.curves, **of_layers(layers)}, found)


def seen_of_run(run: TrainedRun) -> SeenRow:
    """Return a finished training run's figures and curves."""
    schemes = (
        f"{kind}{scheme}" for scheme in run.summary.quantization for kind in (INCREASE, DAMAGE)
    )
    domains = (f"{DOMAIN}{name}" for name in run.summary.validation.domains or {})
    names = [*PLAIN, *run.summary.diagnosis, *schemes, *domains]
    figures = {name: value for name in names if (value := figure_of(run, name)) is not None}
    tokens = float(run.summary.tokens)
    figures |= {"tokens": tokens, "all_tokens": tokens, "seconds": run.summary.seconds}
    curves = {"train_loss": train_curve([run]), "validation_loss": validation_curve(run)}
    return SeenRow(figures, curves)


def validation_curve(run: TrainedRun) -> Curve:
    """Return the validation loss by step, each as it was last written."""
    rows = run.metrics.filter(pl.col("kind") == "validation").unique("step", keep="last")
    rows = rows.sort("step").drop_nulls("loss")
    return rows["step"].to_numpy(), rows["loss"].to_numpy()


def answer_name(task: str, metric: str, shots: int = 0) -> str:
    """Return what a task's figure is called: `acc_piqa`, or `acc_average` of their average.

    With five shots it is `acc_mmlu_5_shots`.
    """
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


def seen_of_arm(arm: Arm, training: Curve) -> SeenRow:
    """Return the figures and curves of an heir or a baseline, as `seen_of_run`.

    `all_tokens` are the `tokens` with those of the rounds of growth before it.
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
    return SeenRow(figures, {"train_loss": training, "validation_loss": (steps, curve)})


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
