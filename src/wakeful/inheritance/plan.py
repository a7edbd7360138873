"""From options to a recipe: its layers, its rounds, its training."""

import dataclasses
import math
from pathlib import Path

from wakeful.config.schema import DataConfig, DistillConfig
from wakeful.data.base import Data
from wakeful.errors import WakefulError
from wakeful.inheritance.layers import LayerMap, first, from_order, growth_order, named_layers
from wakeful.inheritance.options import InheritOptions
from wakeful.inheritance.recipe import Recipe

_SHARED_FIELDS = (
    "route", "normalizer", "grow", "until", "bridge", "heal",
    "optimizer",
)  # fmt: skip
"""Fields of a recipe that are options too."""
_EVALUATIONS = 5
"""Evaluations of a round after its start, unless train.eval_every says otherwise."""


Angles = list[list[float]]
"""Angular distances between layers, as `diagnose_layers` returns them."""


def plan_layers(options: InheritOptions, total: int, angles: Angles | None) -> LayerMap:
    """Return which of a reference's `total` layers the first heir gets: those that the options
    name, or else those that `angles` choose, or without angles the first ones.
    """
    if options.blocks:
        return named_layers(options.blocks, of=total)
    depth = depth_of(options, total)
    if angles is None:
        return first(depth, of=total)
    return from_order(growth_order(angles, depth), depth, options.choose)


def depth_of(options: InheritOptions, total: int) -> int:
    """Return the number of layers of the first heir where its layers are not named."""
    return options.layers or max(1, round((options.keep or 0.5) * total))


def make_recipe(
    source: str, options: InheritOptions, total: int, data: Data, angles: Angles | None
) -> Recipe:
    """Return the recipe that the options describe for a reference of `total` layers, which is read
    from `source` (a name or a path). Without `angles` layers are taken from the first on.

    Raises:
        WakefulError: the heir is to grow and has all layers of the reference already.
    """
    layers = plan_layers(options, total, angles)
    order: tuple[int, ...] = ()  # in which a growing heir takes layers; named ones have none
    if not options.blocks:
        order = tuple(range(total) if angles is None else growth_order(angles, len(layers)))
    if options.grow and len(layers) == total:
        raise WakefulError(
            f"the heir has all {total} layers of the reference: leave out --grow, or begin with "
            "fewer --layers"
        )
    rounds_to_full_depth = 1
    if options.grow:
        rounds_to_full_depth += math.ceil((total - len(layers)) / options.grow)
    train = options.train
    return Recipe(
        reference=absolute_source(source),
        rule=layers.rule,
        layers=layers.sources,
        order=order,
        rounds=options.rounds or rounds_to_full_depth,
        baselines=options.baseline,
        data=DataConfig(
            source=data.prepared_source,
            cross_documents=options.data.cross_documents,
            bos=options.data.bos,
            max_tokens=options.data.max_tokens,
        ),
        train=dataclasses.replace(
            train,
            eval_every=train.eval_every or math.ceil(train.steps / _EVALUATIONS),
            distill=DistillConfig(),
        ),
        **{name: getattr(options, name) for name in _SHARED_FIELDS},
    )


def absolute_source(source: str) -> str:
    """Return a model's path made absolute; another name stays as it is."""
    return str(Path(source).resolve()) if Path(source).exists() else source
