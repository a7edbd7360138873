"""Stages of a recipe: training runs, each with its start, its loss and its bridges."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wakeful.config.schema import DistillConfig
from wakeful.config.tables import from_table
from wakeful.inheritance.recipe import FROM_TEXT
from wakeful.model.decoder import Decoder
from wakeful.runs.records import BridgeGap, RunSummary
from wakeful.runs.run import Run
from wakeful.terminal.display import OnProgress


@dataclass(frozen=True, kw_only=True)
class TrainingStage:
    """One training run of a recipe."""

    name: str
    """Its folder."""
    arm: str
    """The line of the comparison it belongs to."""
    summary: str
    """The arm's start, in words."""
    steps: int
    offset: int = 0
    """Steps of the arm before this stage."""
    start: Callable[[], Decoder]
    layers: tuple[int, ...] = ()
    """The reference's layers that an heir has."""
    objective: DistillConfig = FROM_TEXT
    """The loss it learns by."""
    bridge: Callable[[Decoder, OnProgress], list[BridgeGap]] | None = None
    """Bridges the layers that an heir drops, in place, after its start."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its run.json about its start."""


@dataclass(frozen=True)
class FinishedStage:
    """A stage and its finished run."""

    stage: TrainingStage
    run: Run

    @property
    def summary(self) -> RunSummary:
        return self.run.read(RunSummary, "summary.json")

    @property
    def loss(self) -> float:
        """Final loss on the full validation set, nats per token."""
        return self.summary.validation.loss

    @property
    def bridges(self) -> tuple[BridgeGap, ...]:
        """Bridges at its start, in order of depth."""
        recorded = (self.run.header.initial or {}).get("bridges", [])
        return from_table(tuple[BridgeGap, ...], recorded, record="run.json")


@dataclass(frozen=True)
class FinishedStages:
    """The heir's rounds and the baselines' stages, in the order they ran."""

    rounds: tuple[FinishedStage, ...]
    baselines: tuple[FinishedStage, ...]
