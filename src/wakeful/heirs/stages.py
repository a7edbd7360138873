"""The training runs that a recipe takes, each a stage: what it starts from and learns from."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from wakeful.config.schema import Config, DistillConfig, LoraConfig
from wakeful.config.tables import from_table
from wakeful.display import Passed
from wakeful.heirs.baselines import Baseline, Setting, at_random, baseline_of
from wakeful.heirs.bridge import Bridged, check_bridge, gaps
from wakeful.heirs.layers import LayerMap, first, laziest
from wakeful.heirs.narrow import narrow_config
from wakeful.heirs.recipe import Recipe
from wakeful.heirs.solving import narrowed_reference
from wakeful.model.decoder import Decoder
from wakeful.runs.distributed import ALONE, World
from wakeful.runs.run import Run
from wakeful.training.records import Summary
from wakeful.training.setup import check_parts


def check_stages(recipe: Recipe, reference: Decoder, world: World = ALONE) -> Config:
    """Raise what the training of any stage by these processes would raise; return the
    configuration of them all.

    Every model is made on the meta device, where weights take no memory.
    """
    with torch.device("meta"):
        blank = Decoder(reference.config)
    setting = setting_of(recipe, blank, recipe.layer_map(recipe.rounds - 1))
    if recipe.width:
        check_bridge(blank, "leave out --width")
    if "narrow" in recipe.baselines:
        check_bridge(blank, "leave out the baseline narrow")
    if recipe.bridge.map != "none" and gaps(recipe.layer_map(0), blank.config.num_layers):
        check_bridge(blank)
    arms = [
        (name, arm, learning(recipe, arm, setting)) for name, arm in trained_arms(recipe).items()
    ]
    arms.insert(1, ("heir", _HEIR, (recipe.lesson("sum"), LoraConfig())))
    for name, arm, learned in arms:
        with torch.device("meta"):
            decoder = arm.stand_in(setting)
            if arm.second is not None:
                decoder = arm.second(setting, decoder)
        check_parts(arm_config(recipe, name, decoder, recipe.train.steps, learned), world)
    return config_of_reference(recipe, reference)


def config_of_reference(recipe: Recipe, reference: Decoder) -> Config:
    """Return the configuration of a stage that would train the whole reference."""
    return arm_config(recipe, "reference", reference, recipe.train.steps)


Learned = tuple[DistillConfig, LoraConfig]
"""The loss and the adapters that an arm learns by."""
_FROM_TEXT: Learned = DistillConfig(), LoraConfig()


@dataclass(frozen=True)
class TrainingStage:
    """One training run of a recipe."""

    name: str
    """Its folder."""
    arm: str
    """The line of the comparison it belongs to."""
    steps: int
    offset: int
    """Steps that the arm has taken before it."""
    start: Callable[[Passed], Decoder]
    """Makes the model, and tells how far the closed forms of a narrow one are."""
    layers: tuple[int, ...] = ()
    """The reference's layers that it took, where it took any by number."""
    learned: Learned = _FROM_TEXT
    bridge: Callable[[Decoder, Passed], list[Bridged]] | None = None
    """Bridges the layers that it leaves out, once it has started."""


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
        """Final loss on the full validation set, nats a token."""
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


def _heir_shape(setting: Setting) -> Decoder:
    """Return a model of an heir's shape, to look at or to time, without what it takes to make."""
    if setting.shape is not None:
        return at_random(setting, setting.num_layers)
    return setting.inherit(setting.layers, copy=setting.copy)


_HEIR = Baseline("", _heir_shape, heals=True, bridged=True)


def trained_arms(recipe: Recipe) -> dict[str, Baseline]:
    """Return what is trained, to look at or to time, by name: the heir, then the baselines."""
    return {"heir": _HEIR, **{name: baseline_of(name) for name in recipe.baselines}}


def setting_of(recipe: Recipe, reference: Decoder, layers: LayerMap) -> Setting:
    """Return the setting of the baselines of an heir of these layers."""
    return Setting(
        reference,
        layers,
        seed=recipe.train.seed,
        lazy=laziest(recipe.ranks, len(layers)) if len(layers) <= len(recipe.ranks) else None,
        route=recipe.route,
        normalizer=recipe.normalizer,
        shape=narrow_config(reference.config, recipe.width) if recipe.width else None,
        copy=recipe.copy,
        narrowed=partial(narrowed_reference, recipe, reference),
    )


def learning(recipe: Recipe, baseline: Baseline, setting: Setting) -> Learned:
    """Return a baseline's loss and its adapters."""
    if not baseline.heals:
        return recipe.lesson(baseline.distil), LoraConfig()
    total = setting.reference.config.num_layers
    layers = setting.layers if baseline.bridged else first(total, of=total)
    return recipe.healing(layers, total), recipe.heal.lora


def arm_config(
    recipe: Recipe, name: str, decoder: Decoder, steps: int, learned: Learned = _FROM_TEXT
) -> Config:
    """Return the configuration of so many steps of an arm, to look at or to time them."""
    stage = TrainingStage(name, name, steps, 0, lambda _: decoder, learned=learned)
    return stage_config(recipe, stage, decoder)


def half_way(recipe: Recipe, steps: int) -> int:
    """Return the steps of a first half, so that both halves are evaluated where others are."""
    every = min(recipe.train.eval_every or 1, steps // 2) or 1
    return max(every, steps // 2 // every * every)


def stage_config(recipe: Recipe, stage: TrainingStage, decoder: Decoder) -> Config:
    """Return the configuration of a stage's run."""
    distill, lora = stage.learned
    asked = recipe.optimizer.warmup_steps
    warmup = min(asked, stage.steps) if asked else round(recipe.warmup * stage.steps)
    return Config(
        name=stage.name,
        model=decoder.config,
        data=dataclasses.replace(recipe.data, first_batch=stage.offset),
        optimizer=dataclasses.replace(recipe.optimizer, warmup_steps=warmup),
        train=dataclasses.replace(recipe.train, steps=stage.steps, distill=distill, lora=lora),
        sample=recipe.sample,
    )
