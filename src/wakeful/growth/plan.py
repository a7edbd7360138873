"""From what a user asks to a recipe: which layers, how many rounds, what training."""

import dataclasses
from pathlib import Path

from wakeful.config.schema import DataConfig, OptimizerConfig, SampleConfig, TrainConfig
from wakeful.data.tokens import PreparedData
from wakeful.errors import WakefulError
from wakeful.growth.baselines import check_names
from wakeful.growth.choose import By, Diagnosed, ordered
from wakeful.growth.layermap import RANGES, LayerMap, chosen
from wakeful.growth.recipe import Recipe
from wakeful.growth.wishes import Wishes

_GROWS = ("first", "rank", "mass", "influence", "angle")
"""Choices that say which layer comes next."""


def check_wishes(wishes: Wishes) -> None:
    """Raise `WakefulError` where wishes contradict each other or ask for what does nothing."""
    check_names(wishes.baseline)
    depth = [name for name in ("layers", "keep", "blocks") if getattr(wishes, name)]
    if len(depth) > 1:
        raise WakefulError(f"--{depth[0]} and --{depth[1]} both say which layers: give one")
    if wishes.blocks and wishes.choose != "first":
        raise WakefulError(f"--blocks names the layers, so --choose {wishes.choose} does nothing")
    if not 0 <= wishes.keep <= 1:
        raise WakefulError(f"keep = {wishes.keep} is a share of the layers, between 0 and 1")
    if wishes.text and wishes.data != Wishes().data:
        raise WakefulError("--text and --data both name the text: give one")
    for name in ("layers", "grow", "rounds", "steps", "minutes", "pinned", "eval_every",
                 "checkpoint_every"):  # fmt: skip
        if getattr(wishes, name) < 0:
            raise WakefulError(f"{name} must not be negative, got {getattr(wishes, name)}")
    if not 0 <= wishes.warmup <= 1:
        raise WakefulError(f"warmup = {wishes.warmup} is a share of the steps, between 0 and 1")
    if not wishes.grow and (wishes.rounds > 1 or wishes.until != "parity"
                            or wishes.grow_from != "reference"):  # fmt: skip
        raise WakefulError("--rounds, --until and --grow_from are for growing: give --grow too")
    if wishes.diagnose_length < 2 or wishes.diagnose_sequences < 1:
        raise WakefulError("diagnose_length must be at least 2 and diagnose_sequences 1")


def plan_layers(wishes: Wishes, total: int, diagnosed: Diagnosed | None) -> LayerMap:
    """Return the first heir's layers; without a diagnosis one that is as deep."""
    if wishes.blocks:
        return chosen(wishes.blocks, of=total)
    depth = wishes.layers or max(1, round((wishes.keep or 0.5) * total))
    if wishes.choose in RANGES:
        return RANGES[wishes.choose](depth, of=total)
    if diagnosed is None:
        return RANGES["first"](depth, of=total)
    order = ordered(diagnosed, _by(wishes), depth, pinned=wishes.pinned)
    return LayerMap(tuple(sorted(order[:depth])), wishes.choose)


def make_recipe(
    source: str, wishes: Wishes, total: int, data: PreparedData, diagnosed: Diagnosed | None
) -> Recipe:
    """Return the recipe that wishes come to, with one step where their number is still open."""
    layers = plan_layers(wishes, total, diagnosed)
    order: tuple[int, ...] = ()
    if not wishes.blocks and wishes.choose in _GROWS:
        order = tuple(range(total))
        if diagnosed is not None and wishes.choose != "first":
            order = tuple(ordered(diagnosed, _by(wishes), len(layers), pinned=wishes.pinned))
    room = (total - len(layers)) // wishes.grow if wishes.grow else 0
    if wishes.grow and not room:
        raise WakefulError(
            f"growing {len(layers)} layers by {wishes.grow} goes past the reference's {total}"
        )
    recipe = Recipe(
        reference=_lasting(source),
        rule=layers.rule,
        layers=layers.sources,
        order=order,
        ranks=tuple(diagnosed.figures["rank"]) if diagnosed else (),
        copy=wishes.copy,
        route=wishes.route,
        normalizer=wishes.normalizer,
        grow=wishes.grow,
        rounds=wishes.rounds or 1 + room,
        until=wishes.until,
        grow_from=wishes.grow_from,
        minutes=wishes.minutes,
        baselines=wishes.baseline,
        alpha=wishes.alpha,
        temperature=wishes.temperature,
        data=DataConfig(source=str(data.folder)),
        sample=SampleConfig(prompts=wishes.prompts, num_tokens=32),
    )
    return with_steps(recipe, wishes, wishes.steps or 2)


def with_steps(recipe: Recipe, wishes: Wishes, steps: int) -> Recipe:
    """Return the recipe with so many steps a round, and what follows from their number."""
    train = TrainConfig(
        steps=steps,
        batch_size=wishes.batch_size,
        micro_batch_size=wishes.micro_batch_size,
        length=wishes.length,
        seed=wishes.seed,
        device=wishes.device,
        dtype=wishes.dtype,
        eval_every=wishes.eval_every or max(1, steps // 5),
        eval_batch_size=wishes.batch_size,
        checkpoint_every=wishes.checkpoint_every,
        keep_checkpoints=1,
    )
    optimizer = OptimizerConfig(
        name=wishes.optimizer,
        lr=wishes.lr,
        final_lr=wishes.lr / 10,
        warmup_steps=round(wishes.warmup * steps),
        weight_decay=wishes.weight_decay,
    )
    return dataclasses.replace(recipe, train=train, optimizer=optimizer)


def _by(wishes: Wishes) -> By:
    choose = wishes.choose
    assert choose in ("rank", "mass", "influence", "angle", "lazy")
    return choose


def _lasting(source: str) -> str:
    """Return a path that holds from any folder, and a name as it is."""
    return str(Path(source).resolve()) if Path(source).exists() else source
