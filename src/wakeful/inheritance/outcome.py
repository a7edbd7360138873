"""The outcome of a recipe: losses and sizes side by side, as summary.json has them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from wakeful.errors import WakefulError
from wakeful.estimates import finite_or_none, mean_paired_difference, weighted_mean
from wakeful.inheritance.recipe import Recipe
from wakeful.inheritance.stages import FinishedStage, FinishedStages
from wakeful.runs.records import BridgeGap, DataFacts, StepRow, ValidationRow, logged_rows
from wakeful.runs.run import Environment, Run, read_windows

REFERENCE = "exported-reference"
"""The folder that a reference in memory is exported to; `reference` is a baseline's."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """An evaluation of an arm; steps and tokens count from the arm's beginning."""

    run: str
    step: int
    tokens: int
    loss: float
    standard_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class PartLoss:
    """The loss on one part of a mixture, and minus the reference's, paired by window."""

    part: str
    loss: float
    standard_error: float | None
    minus_reference: float
    minus_reference_error: float | None
    windows: int
    """Number of windows behind the errors."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A model of the comparison that was trained here: an heir or a baseline."""

    arm: str
    heir: bool
    summary: str
    runs: tuple[str, ...]
    """The folders of its stages."""
    depth: int
    layers: tuple[int, ...]
    steps: int
    tokens: int
    seconds: float
    all_steps: int
    """Steps with those of earlier rounds of growth; tokens likewise."""
    all_tokens: int
    parameters: int
    cache_bytes_per_token: int | float
    loss: float
    standard_error: float | None
    start_loss: float
    minus_heir: float
    minus_heir_error: float | None
    minus_reference: float
    minus_reference_error: float | None
    parity: bool
    curve: tuple[Point, ...]
    parts: tuple[PartLoss, ...] = ()
    """Of a text that is a mixture."""

    @property
    def name(self) -> str:
        """The name, such as "heir-15" or "random"."""
        return self.arm


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The reference, with its own training's cost where it is known."""

    name: str
    source: str = ""
    layers: int
    parameters: int
    cache_bytes_per_token: int | float
    loss: float
    standard_error: float | None = None
    tokens: int | None
    seconds: float | None
    agreement: str = ""
    """Difference of our decoder from the model that Transformers runs; "" of our own."""
    parts: tuple[PartLoss, ...] = ()
    """Losses on the parts of a mixture."""


@dataclass(frozen=True, kw_only=True)
class InheritanceSummary:
    """summary.json of an inheritance."""

    reference: Reference
    final: str
    """The arm of the last heir."""
    arms: tuple[Arm, ...]
    recipe: Recipe
    bridges: tuple[BridgeGap, ...] = ()
    """Over the layers that the last heir drops."""
    departures: tuple[str, ...] = field(default=())
    """Reasons why the heir computes otherwise than the inherited blocks, before any training."""
    data: DataFacts
    """The text that everything was trained and measured on."""

    def __post_init__(self) -> None:
        if self.final not in {arm.name for arm in self.arms}:
            raise WakefulError(f"final = {self.final!r} names no arm")

    @property
    def heir(self) -> Arm:
        """The arm of the last heir."""
        return next(arm for arm in self.arms if arm.name == self.final)


def group_by_arm(outcome: FinishedStages) -> list[tuple[str, list[FinishedStage]]]:
    """Return pairs (name, stages in order) of the models that are compared (arms), heirs first."""
    stages: dict[str, list[FinishedStage]] = {}
    for finished in (*outcome.rounds, *outcome.baselines):
        stages.setdefault(finished.stage.arm, []).append(finished)
    return list(stages.items())


def loss_curve(stages: Sequence[FinishedStage]) -> tuple[Point, ...]:
    """Return all evaluations of a model that was trained in `stages`, with steps and tokens counted
    from the first stage's beginning.

    The end of one stage and the beginning of the next are two points at the same step.
    """
    points: list[Point] = []
    tokens = 0  # of earlier stages
    for finished in stages:
        tokens_at = {row.step: row.tokens for row in logged_rows(finished.run, StepRow)}
        points += [
            Point(
                run=finished.stage.name,
                step=finished.stage.offset + row.step,
                tokens=tokens + tokens_at.get(row.step, 0),
                loss=row.loss,
                standard_error=row.standard_error,
            )
            for row in logged_rows(finished.run, ValidationRow)
        ]
        tokens += max(tokens_at.values(), default=0)
    return tuple(points)


def compare_arms(
    outcome: FinishedStages, reference: pl.DataFrame, reference_loss: float
) -> tuple[Arm, ...]:
    """Return the figures of each heir and baseline, with its loss minus the last heir's and minus
    the reference's.

    `reference` has the reference's loss in every validation window. A model whose loss is at most
    `reference_loss` has reached parity.
    """
    last_heir = outcome.rounds[-1]
    arms = []
    for name, stages in group_by_arm(outcome):
        final, points = stages[-1], loss_curve(stages)
        validation = final.summary.validation
        is_heir = final in outcome.rounds
        all_stages = stages
        if is_heir:  # earlier rounds of growth had to be trained to get here
            all_stages = outcome.rounds[: outcome.rounds.index(final) + 1]
        windows = _read_windows(final)
        minus_heir, minus_heir_error = 0.0, None
        if final is not last_heir:
            minus_heir, minus_heir_error = _paired_difference(windows, _read_windows(last_heir))
        minus_reference, minus_reference_error = _paired_difference(windows, reference)
        arms.append(
            Arm(
                arm=name,
                heir=is_heir,
                summary=final.stage.summary,
                runs=tuple(finished.stage.name for finished in stages),
                depth=final.run.config.model.num_layers,
                layers=final.stage.layers,
                steps=final.stage.offset + final.stage.steps,
                tokens=sum(finished.summary.tokens for finished in stages),
                seconds=sum(finished.summary.seconds for finished in stages),
                all_steps=sum(finished.stage.steps for finished in all_stages),
                all_tokens=sum(finished.summary.tokens for finished in all_stages),
                parameters=final.summary.parameters.total,
                cache_bytes_per_token=final.summary.kv_cache_bytes_per_token,
                loss=validation.loss,
                standard_error=validation.standard_error,
                start_loss=points[0].loss,
                minus_heir=minus_heir,
                minus_heir_error=minus_heir_error,
                minus_reference=minus_reference,
                minus_reference_error=minus_reference_error,
                parity=validation.loss <= reference_loss,
                curve=points,
                parts=losses_by_part(windows, reference),
            )
        )
    return tuple(arms)


def _paired_difference(windows: pl.DataFrame, baseline: pl.DataFrame) -> tuple[float, float | None]:
    """Return a model's mean loss minus the baseline's over the same validation windows, and the
    standard error of this difference; None if the error is not finite.

    Both frames have a row for each window with its number and loss, `windows` also with its tokens.
    """
    baseline = baseline.select("window", baseline="loss")
    joined = windows.join(baseline, on="window", maintain_order="left")
    loss, error = mean_paired_difference(joined["loss"], joined["baseline"], joined["tokens"])
    return loss, finite_or_none(error)


def losses_by_part(windows: pl.DataFrame, reference: pl.DataFrame) -> tuple[PartLoss, ...]:
    """Return a model's loss on each part of a mixture and its difference to the reference's, from
    the losses of both in every validation window; () if the text is no mixture.
    """
    if "domain" not in reference.columns:
        return ()
    losses = []
    for (part,), part_windows in windows.group_by("domain", maintain_order=True):
        loss, error = weighted_mean(part_windows["loss"], part_windows["tokens"])
        minus, minus_error = _paired_difference(part_windows, reference)
        losses.append(
            PartLoss(
                part=str(part), loss=loss, standard_error=finite_or_none(error),
                minus_reference=minus, minus_reference_error=minus_error, windows=len(part_windows),
            )
        )  # fmt: skip
    return tuple(losses)


def _read_windows(finished: FinishedStage) -> pl.DataFrame:
    return read_windows(finished.run.path / "validation.parquet")


def read_inheritance(path: str | Path) -> tuple[InheritanceSummary, Environment]:
    """Return the summary of the inheritance in the folder `path`, and its environment.

    Raises:
        WakefulError: the folder has no inheritance, it is not finished, or a field is missing or
            has a value of another type.
    """
    run = Run.open(path)
    run.check_kind("inherit", "is not an inheritance")
    return run.read(InheritanceSummary, "summary.json"), run.read(Environment, "environment.json")
