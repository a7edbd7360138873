"""Settings of an inheritance: layers, bridges, healing, growth, baselines.

Every model is an ordinary training run in a folder of its own, so each can be resumed, reported,
generated from, diagnosed and inherited from again.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from wakeful.config.schema import (
    BridgeConfig,
    Config,
    DataConfig,
    DistillConfig,
    HealConfig,
    OptimizerConfig,
    TrainConfig,
)
from wakeful.config.tables import from_table, read_table
from wakeful.errors import WakefulError
from wakeful.inheritance.layers import LayerMap, from_order
from wakeful.inheritance.options import BaselineName, Until
from wakeful.model.decoder import Decoder

FROM_TEXT = DistillConfig()
"""Cross-entropy alone."""
_WARMUP = 0.05
"""Share of a run's steps in which the learning rate rises, without optimizer.warmup_steps."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """recipe.toml: all settings of an inheritance, resolved."""

    reference: str
    """Name or path of the model to inherit from."""
    rule: str
    """Rule by which the layers were chosen."""
    layers: tuple[int, ...]
    """The reference's layers that the first heir takes, in its order."""
    order: tuple[int, ...] = ()
    """All of the reference's layers in the order that growing takes them; empty: no growing."""
    route: str = ""
    normalizer: str = ""
    grow: int = 0
    """Layers that each round adds."""
    rounds: int = 1
    """Maximum rounds."""
    until: Until = "parity"
    baselines: tuple[BaselineName, ...] = ()
    bridge: BridgeConfig = field(default_factory=lambda: BridgeConfig(map="none"))
    """Bridges of the heirs."""
    heal: HealConfig = field(default_factory=lambda: HealConfig(by="text"))
    """The heirs' teacher and loss."""
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def check(self, num_layers: int) -> None:
        """Raise `WakefulError` if the recipe cannot be carried out on a reference of `num_layers`
        layers.
        """
        LayerMap(self.layers, self.rule).check(num_layers)
        if len(set(self.baselines)) < len(self.baselines):
            raise WakefulError(f"a baseline is named twice: {', '.join(self.baselines)}")
        if self.rounds > 1 and not self.order:
            raise WakefulError(
                f"layers chosen by {self.rule!r} have no order to grow in: use --choose angle or "
                "first"
            )
        # The round before the last must leave a layer to add.
        if self.rounds > 1 and self.depth(self.rounds - 2) == num_layers:
            raise WakefulError(
                f"an heir that starts at {len(self.layers)} layers and grows by {self.grow} has "
                f"all {num_layers} of the reference before round {self.rounds}: give fewer rounds"
            )

    @property
    def healing(self) -> DistillConfig:
        """The heirs' loss: distillation from the reference, or cross-entropy on the text."""
        heal = self.heal
        if heal.by != "reference":
            return FROM_TEXT
        return DistillConfig(teacher=self.reference, alpha=heal.alpha, temperature=heal.temperature)

    def layer_map(self, number: int) -> LayerMap:
        """Return the layers of round `number`, from 0."""
        if number == 0:
            return LayerMap(self.layers, self.rule)
        return from_order(self.order, self.depth(number), self.rule)

    def depth(self, number: int) -> int:
        """Return the number of layers of round `number`, from 0; the last may grow by fewer."""
        depth = len(self.layers) + number * self.grow
        return min(depth, len(self.order)) if self.order else depth

    def warmup_steps(self, steps: int) -> int:
        """Return the warmup of a run of `steps` steps: as the optimizer has it, else 5% of them."""
        return min(self.optimizer.warmup_steps, steps) or round(_WARMUP * steps)

    def run_config(
        self,
        name: str,
        decoder: Decoder,
        steps: int,
        objective: DistillConfig = FROM_TEXT,
        *,
        offset: int = 0,
    ) -> Config:
        """Return the configuration of a run `name` that trains a model of the decoder's shape for
        `steps` steps with the loss `objective`, on the batches that follow the first `offset`.
        """
        return Config(
            name=name,
            model=decoder.config,
            data=dataclasses.replace(self.data, first_batch=offset),
            optimizer=dataclasses.replace(self.optimizer, warmup_steps=self.warmup_steps(steps)),
            train=dataclasses.replace(self.train, steps=steps, distill=objective),
        )


def read_recipe(folder: Path) -> Recipe:
    """Return the recipe of an inheritance's folder."""
    return from_table(Recipe, read_table(folder / "recipe.toml"))
