"""From options to a recipe: its layers, its rounds, its training."""

import dataclasses
import glob
import math
from pathlib import Path

import polars as pl

from wakeful.config.schema import DataConfig, DistillConfig
from wakeful.data.base import Data
from wakeful.data.mixture import mixture_of
from wakeful.data.sources import MIXTURE
from wakeful.errors import WakefulError
from wakeful.inheritance.layers import LayerMap, first, from_order, growth_order, named_layers
from wakeful.inheritance.options import InheritOptions
from wakeful.inheritance.recipe import Recipe
from wakeful.training import mean_loss

_SHARED_FIELDS = (
    "copy", "route", "normalizer", "grow", "until", "seeds", "bridge", "heal",
    "optimizer",
)  # fmt: skip
"""Fields of a recipe that are options too."""
_EVALUATIONS = 5
"""Evaluations of a round after its start, unless train.eval_every says otherwise."""
_RESOLUTION = 0.1
"""Nats: the difference between two heirs that a budget should be able to resolve."""
_FEWEST_STEPS = 20
"""In this many, half of SmolLM2 moves by a third of a nat (docs/archive/findings.md)."""
_WINDOWS = 20
"""A standard error over n windows is itself known to 1 / √(2 (n − 1)): over these to a sixth."""
_LONGER = "--validation_fraction, or a longer --validation_text"
"""Options that make a validation set longer."""


Angles = list[list[float]]
"""Angular distances between layers, as `diagnose_layers` returns them."""


def plan_layers(options: InheritOptions, total: int, angles: Angles | None) -> LayerMap:
    """Return the layers of the first heir of a reference of `total` layers: those that the options
    name, those that `angles` choose, or without angles the first ones.
    """
    if options.blocks:
        return named_layers(options.blocks, of=total)
    depth = depth_of(options, total)
    if angles is None:
        return first(depth, of=total)
    return from_order(_ordered(angles, options, depth), depth, options.choose)


def depth_of(options: InheritOptions, total: int) -> int:
    """Return the number of layers of the first heir where its layers are not named."""
    return options.layers or max(1, round((options.keep or 0.5) * total))


def make_recipe(
    source: str, options: InheritOptions, total: int, data: Data, angles: Angles | None
) -> Recipe:
    """Return the recipe that the options describe for a reference of `total` layers called
    `source`. Without `angles` layers are taken from the first on.

    Raises:
        WakefulError: the heir is to grow and has all layers of the reference already.
    """
    layers = plan_layers(options, total, angles)
    order: tuple[int, ...] = ()
    if not options.blocks:
        order = tuple(range(total) if angles is None else _ordered(angles, options, len(layers)))
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
        # A number of warmup steps overrules a share of the steps.
        warmup=0.0 if options.optimizer.warmup_steps else options.warmup,
        train=dataclasses.replace(
            train,
            eval_every=train.eval_every or math.ceil(train.steps / _EVALUATIONS),
            distill=DistillConfig(),
        ),
        **{name: getattr(options, name) for name in _SHARED_FIELDS},
    )


def _ordered(angles: Angles, options: InheritOptions, num_layers: int) -> list[int]:
    return growth_order(angles, num_layers, pinned=options.pinned, gaps=options.gaps)


def absolute_source(source: str) -> str:
    """Return a source of text or a model's name with absolute paths: those of files that exist, of
    a glob that matches any, and of a mixture's parts. Other names stay as they are.
    """
    domains = mixture_of(source)
    if domains is not None:
        parts = [(part.name, absolute_source(part.source), part.weight) for part in domains]
        return f"{MIXTURE}(parts={parts!r})"
    exists = source and (Path(source).exists() or glob.glob(source, recursive=True))
    return str(Path(source).resolve()) if exists else source


def budget_warnings(recipe: Recipe, reference: pl.DataFrame) -> list[str]:
    """Return warnings that the validation text or the steps are too few to tell heirs apart, each
    with how many would suffice; [] where they suffice.

    `reference` has the reference's loss in every validation window. Its standard error over n
    windows is an upper estimate of the differences' errors, and falls with √n.
    """
    reasons = []
    _, error = mean_loss(reference)
    windows, tokens = len(reference), int(reference["tokens"].sum())
    prefix = f"the validation text has {tokens:,} tokens in"
    if windows < 2:
        enough = _WINDOWS * recipe.train.length
        reasons.append(
            f"{prefix} one window, which gives no error at all; {enough:,} tokens in {_WINDOWS} "
            f"windows would ({_LONGER})"
        )
    elif error > _RESOLUTION:
        times = (error / _RESOLUTION) ** 2  # as much text, for an error of _RESOLUTION
        reasons.append(
            f"{prefix} {windows} windows, over which the reference's own loss is known to ± "
            f"{error:.2f} nats: smaller differences between heirs may be noise; "
            f"{times * tokens:,.0f} tokens would tell {_RESOLUTION:g} nats "
            f"({_LONGER})"
        )
    if recipe.train.steps < _FEWEST_STEPS:
        reasons.append(
            f"after {recipe.train.steps} steps a model has hardly changed from its start: "
            f"{_FEWEST_STEPS} are the fewest that tell what training brings (--steps)"
        )
    return reasons
