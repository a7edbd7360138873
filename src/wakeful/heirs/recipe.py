"""Everything that decides an inheritance: layers, bridges, healing, growth, baselines.

Every model is an ordinary training run in a folder of its own, so each can be resumed, reported,
generated from, diagnosed and inherited from again.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from wakeful.config.schema import (
    BridgeConfig,
    DataConfig,
    DistillConfig,
    HealConfig,
    OptimizerConfig,
    SampleConfig,
    TrainConfig,
    WidthConfig,
)
from wakeful.config.tables import from_table, read_table
from wakeful.config.verbs import Copy, GrowFrom, Until
from wakeful.errors import WakefulError
from wakeful.heirs.baselines import Distil, check_baselines
from wakeful.heirs.layers import LayerMap, from_order


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what is trained, resolved; recipe.toml holds it."""

    reference: str
    """The model to inherit from, as it was named."""
    rule: str
    """How the layers were chosen."""
    layers: tuple[int, ...]
    """The reference's layers that the first heir takes, in its order."""
    order: tuple[int, ...] = ()
    """All of the reference's layers in the order that growing takes them; empty: no growing."""
    ranks: tuple[float, ...] = ()
    """Each layer's rank, where a baseline needs the laziest run."""
    copy: Copy = "all"
    route: str = ""
    normalizer: str = ""
    width: WidthConfig = field(default_factory=WidthConfig)
    """Heads and channels of the heirs."""
    drops: int = 1
    """Parts in which the layers left out are dropped, with healing in between."""
    grow: int = 0
    """Layers that each round adds."""
    rounds: int = 1
    """Maximum rounds."""
    until: Until = "parity"
    grow_from: GrowFrom = "reference"
    minutes: float = 0.0
    """No round begins after this many minutes of training. 0: no limit."""
    seeds: tuple[int, ...] = ()
    """Everything is trained with each; empty: with train.seed alone."""
    baselines: tuple[str, ...] = ()
    bridge: BridgeConfig = field(default_factory=lambda: BridgeConfig(map="none"))
    """Of the heirs."""
    heal: HealConfig = field(default_factory=lambda: HealConfig(by="text"))
    """The heirs' teacher and loss."""
    alpha: float = 0.6
    """Of the baselines that learn from the reference, as the temperature."""
    temperature: float = 1.0
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    warmup: float = 0.0
    """Share of each run's steps; 0: optimizer.warmup_steps."""
    train: TrainConfig = field(default_factory=TrainConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    def check(self, num_layers: int) -> None:
        """Raise `WakefulError` where the recipe cannot be carried out on that many layers."""
        LayerMap(self.layers, self.rule).check(num_layers)
        check_baselines(self.baselines)
        if self.grow < 0 or self.rounds < 1:
            raise WakefulError(
                f"grow = {self.grow} must not be negative and rounds = {self.rounds} at least 1"
            )
        if self.rounds > 1 and not self.grow:
            raise WakefulError(f"rounds = {self.rounds} without growing: give --grow too")
        if self.rounds > 1 and not self.order:
            raise WakefulError(
                f"layers chosen by {self.rule!r} have no order to grow in: use --choose "
                "first, rank, mass, influence, angle or bridge"
            )
        left_out = num_layers - len(self.layers)
        if self.drops > 1 and not (self.order and self.drops <= min(left_out, self.train.steps)):
            raise WakefulError(
                f"drops = {self.drops}: there are {left_out} layers to drop and "
                f"{self.train.steps} steps to heal in, of which each part needs one, and "
                f"{self.rule!r} must say in which order (first, rank, mass, influence, angle or "
                "bridge)"
            )
        if self.rounds > 1 and self.depth(self.rounds - 2) == num_layers:
            raise WakefulError(
                f"an heir that starts at {len(self.layers)} layers and grows by {self.grow} has "
                f"all {num_layers} of the reference before round {self.rounds}: give fewer rounds"
            )
        if "at_once" in self.baselines and self.most_heirs == 1:
            raise WakefulError(
                "baseline at_once is for --drops and --grow, which come to the last heir's layers "
                "in parts: without them the heir has them at once; leave it out"
            )
        if "stacking" in self.baselines and self.train.steps < 2:
            raise WakefulError("stacking trains in two halves: give at least 2 steps")

    @property
    def most_heirs(self) -> int:
        """Heirs that are trained with each seed, one after another, if none reaches parity."""
        return max(self.drops, self.rounds)

    def of_seeds(self) -> "list[tuple[str, Recipe]]":
        """Return the recipe with each seed and the folder of its runs, the first's here."""
        first, *others = self.seeds or (self.train.seed,)
        named = [("", first), *((f"seed-{seed}", seed) for seed in others)]
        return [
            (name, dataclasses.replace(self, train=dataclasses.replace(self.train, seed=seed)))
            for name, seed in named
        ]

    def healing(self, layers: LayerMap, num_layers: int) -> DistillConfig:
        """The loss of an heir of these layers of the reference's `num_layers`."""
        heal = self.heal
        if heal.by != "reference":
            return DistillConfig()
        return DistillConfig(
            teacher=self.reference, alpha=heal.alpha, temperature=heal.temperature,
            hidden=heal.hidden,
            layers=layers.behind(num_layers) if heal.hidden else (),
        )  # fmt: skip

    def parts(self, num_layers: int) -> list[tuple[LayerMap, int]]:
        """Return the layers after each drop, from the reference's `num_layers`, and its steps."""
        left_out, steps = num_layers - len(self.layers), self.train.steps
        ends = [round(part * steps / self.drops) for part in range(self.drops + 1)]
        return [
            (
                from_order(self.order, num_layers - round(part * left_out / self.drops), self.rule),
                ends[part] - ends[part - 1],
            )
            for part in range(1, self.drops + 1)
        ]

    def drops_to(self, depth: int) -> int:
        """Return the parts in which the layers were dropped that an heir so deep leaves out."""
        if self.drops == 1:
            return 1
        return sum(len(layers) >= depth for layers, _ in self.parts(len(self.order)))

    def lesson(self, distil: Distil) -> DistillConfig:
        """The loss of a baseline."""
        if not distil:
            return DistillConfig()
        return DistillConfig(
            teacher=self.reference, alpha=self.alpha, temperature=self.temperature, over=distil
        )

    def layer_map(self, number: int) -> LayerMap:
        """Return the layers of round `number`, from 0."""
        if number == 0:
            return LayerMap(self.layers, self.rule)
        return from_order(self.order, self.depth(number), self.rule)

    def depth(self, number: int) -> int:
        """Return how many layers round `number` has, from 0; the last may grow by fewer."""
        depth = len(self.layers) + number * self.grow
        return min(depth, len(self.order)) if self.order else depth


def read_recipe(place: Path) -> Recipe:
    """Return the recipe of an inheritance's folder."""
    return from_table(Recipe, read_table(place / "recipe.toml"))
