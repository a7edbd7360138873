"""From what a user asks to a recipe: which layers, how many rounds, what training."""

import dataclasses
from pathlib import Path

from wakeful.config.schema import DataConfig, DistillConfig
from wakeful.config.verbs import InheritOptions
from wakeful.data.tokens import PreparedData
from wakeful.errors import WakefulError
from wakeful.growth.choose import By, Diagnosed, ordered
from wakeful.growth.layermap import RANGES, LayerMap, chosen
from wakeful.growth.recipe import Recipe

_GROWS = ("first", "rank", "mass", "influence", "angle")
"""Choices that say which layer comes next."""


def plan_layers(options: InheritOptions, total: int, diagnosed: Diagnosed | None) -> LayerMap:
    """Return the first heir's layers; without a diagnosis one that is as deep."""
    if options.blocks:
        return chosen(options.blocks, of=total)
    depth = options.layers or max(1, round((options.keep or 0.5) * total))
    if options.choose in RANGES:
        return RANGES[options.choose](depth, of=total)
    if diagnosed is None:
        return RANGES["first"](depth, of=total)
    order = ordered(diagnosed, _by(options), depth, pinned=options.pinned)
    return LayerMap(tuple(sorted(order[:depth])), options.choose)


def make_recipe(
    source: str,
    options: InheritOptions,
    total: int,
    data: PreparedData,
    diagnosed: Diagnosed | None,
) -> Recipe:
    """Return the recipe that options come to, with one step where their number is still open."""
    layers = plan_layers(options, total, diagnosed)
    order: tuple[int, ...] = ()
    if not options.blocks and options.choose in _GROWS:
        order = tuple(range(total))
        if diagnosed is not None and options.choose != "first":
            order = tuple(ordered(diagnosed, _by(options), len(layers), pinned=options.pinned))
    room = (total - len(layers)) // options.grow if options.grow else 0
    if options.grow and not room:
        raise WakefulError(
            f"growing {len(layers)} layers by {options.grow} goes past the reference's {total}"
        )
    recipe = Recipe(
        reference=_lasting(source),
        rule=layers.rule,
        layers=layers.sources,
        order=order,
        ranks=tuple(diagnosed.figures["rank"]) if diagnosed else (),
        copy=options.copy,
        route=options.route,
        normalizer=options.normalizer,
        grow=options.grow,
        rounds=options.rounds or 1 + room,
        until=options.until,
        grow_from=options.grow_from,
        minutes=options.minutes,
        baselines=options.baseline,
        alpha=options.train.distill.alpha,
        temperature=options.train.distill.temperature,
        data=DataConfig(
            source=str(data.folder),
            cross_documents=options.data.cross_documents,
            bos=options.data.bos,
        ),
        sample=options.sample,
    )
    return with_steps(recipe, options, options.train.steps or 2)


def with_steps(recipe: Recipe, options: InheritOptions, steps: int) -> Recipe:
    """Return the recipe with so many steps a round, and what follows from their number."""
    train = dataclasses.replace(
        options.train,
        steps=steps,
        eval_every=options.train.eval_every or max(1, steps // 5),
        distill=DistillConfig(),
    )
    optimizer = options.optimizer
    if not optimizer.warmup_steps:
        optimizer = dataclasses.replace(optimizer, warmup_steps=round(options.warmup * steps))
    return dataclasses.replace(recipe, train=train, optimizer=optimizer)


def _by(options: InheritOptions) -> By:
    choose = options.choose
    assert choose in ("rank", "mass", "influence", "angle", "lazy")
    return choose


def _lasting(source: str) -> str:
    """Return a path that holds from any folder, and a name as it is."""
    return str(Path(source).resolve()) if Path(source).exists() else source
