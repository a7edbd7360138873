"""The training runs that a recipe takes, each a stage: what it starts from and learns from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wakeful.config.schema import DistillConfig, LoraConfig
from wakeful.config.tables import from_table
from wakeful.inheritance.recipe import FROM_TEXT
from wakeful.model.decoder import Decoder
from wakeful.runs.records import Bridged, Summary
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
    """What the arm starts from."""
    steps: int
    offset: int = 0
    """Steps that the arm has taken before it."""
    start: Callable[[], Decoder]
    layers: tuple[int, ...] = ()
    """The reference's layers that an heir took."""
    lesson: tuple[DistillConfig, LoraConfig] = FROM_TEXT
    """The loss and the adapters it learns by."""
    bridge: Callable[[Decoder, OnProgress], list[Bridged]] | None = None
    """Bridges the layers that an heir leaves out, once it has started."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """What else its run.json says of its start."""


@dataclass(frozen=True)
class FinishedStage:
    """A stage and the run it became."""

    stage: TrainingStage
    run: Run

    @property
    def summary(self) -> Summary:
        return self.run.read(Summary, "summary.json")

    @property
    def loss(self) -> float:
        """Final loss on the full validation set, nats per token."""
        return self.summary.validation.loss

    @property
    def bridges(self) -> tuple[Bridged, ...]:
        """All that it began with, in order of depth."""
        recorded = (self.run.header.initial or {}).get("bridges", [])
        return from_table(tuple[Bridged, ...], recorded, record="run.json")


@dataclass(frozen=True)
class FinishedStages:
    """The heir's rounds and the baselines' stages, in the order they ran."""

    rounds: tuple[FinishedStage, ...]
    baselines: tuple[FinishedStage, ...]
