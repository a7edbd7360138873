"""From what a user asks to a recipe: which layers, how many rounds, what training, how many steps.

The steps that fit into the minutes follow from a step of each model that is to be trained.
"""

import dataclasses
import glob
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import polars as pl
import torch

from wakeful.config.schema import Config, DataConfig, DistillConfig
from wakeful.config.verbs import InheritOptions
from wakeful.data.base import Data
from wakeful.data.mixture import mixture_of
from wakeful.data.order import ValidationWindows
from wakeful.data.sources import MIXTURE
from wakeful.device import choose_device
from wakeful.display import Passed, unseen
from wakeful.errors import WakefulError
from wakeful.heirs.baselines import baseline_of
from wakeful.heirs.layers import RANGES, By, Diagnosed, LayerMap, from_order, named_layers, ordered
from wakeful.heirs.recipe import Recipe
from wakeful.heirs.solving import solved_on
from wakeful.heirs.stages import arm_config, config_of_reference, learning, setting_of, trained_arms
from wakeful.model.decoder import Decoder
from wakeful.training.setup import Training, autocast
from wakeful.training.validation import mean_loss

PASSES = 2.0
"""Plain forwards that looking at the layers takes about as long as."""
SOLVED_ON, MEASURED_ON = 12_288, 4_096
"""Tokens that runs of layers are tried on."""
TRIED_LENGTH = 256
"""Of the sequences that these are, at most: many short ones are of more kinds than a few long."""
_GROWS = ("first", "rank", "mass", "influence", "angle", "bridge")
"""Choices that say which layer comes next."""
_AS_ASKED = (
    "copy", "route", "normalizer", "width", "drops", "grow", "until", "grow_from", "minutes",
    "seeds", "bridge", "heal", "sample",
)  # fmt: skip
"""Fields of a recipe that are options too."""


def plan_layers(options: InheritOptions, total: int, diagnosed: Diagnosed | None) -> LayerMap:
    """Return the first heir's layers; without a diagnosis one that is as deep."""
    if options.blocks:
        return named_layers(options.blocks, of=total)
    depth = depth_of(options, total)
    if options.choose in RANGES:
        return RANGES[options.choose](depth, of=total)
    if diagnosed is None:
        return RANGES["first"](depth, of=total)
    return from_order(_ordered(diagnosed, options, depth), depth, options.choose)


def looked_at(options: InheritOptions) -> bool:
    """Whether a choice or a baseline depends on the reference's layers as they are measured."""
    chooses = not options.blocks and options.choose in get_args(By)
    return chooses or bool({"lazy", "lazy_blocks"} & {*options.baseline})


def depth_of(options: InheritOptions, total: int) -> int:
    """Return the layers of the first heir, where they are chosen."""
    share = options.keep or (1.0 if options.width else 0.5)
    return options.layers or max(1, round(share * total))


def make_recipe(
    source: str, options: InheritOptions, total: int, data: Data, diagnosed: Diagnosed | None
) -> Recipe:
    """Return the recipe that options come to; where the number of steps is still open, with as few
    as it can be checked with.
    """
    layers = plan_layers(options, total, diagnosed)
    order: tuple[int, ...] = ()
    if not options.blocks and options.choose in _GROWS:
        order = tuple(range(total))
        if diagnosed is not None and options.choose != "first":
            order = tuple(_ordered(diagnosed, options, len(layers)))
    if options.grow and len(layers) == total:
        raise WakefulError(
            f"the heir has all {total} layers of the reference: leave out --grow, or begin with "
            "fewer --layers"
        )
    room = math.ceil((total - len(layers)) / options.grow) if options.grow else 0
    recipe = Recipe(
        reference=lasting(source),
        rule=layers.rule,
        layers=layers.sources,
        order=order,
        ranks=tuple(diagnosed.figures["rank"]) if diagnosed else (),
        rounds=options.rounds or 1 + room,
        baselines=options.baseline,
        alpha=options.train.distill.alpha,
        temperature=options.train.distill.temperature,
        data=DataConfig(
            source=data.place,
            cross_documents=options.data.cross_documents,
            bos=options.data.bos,
            max_tokens=options.data.max_tokens,
        ),
        **{name: getattr(options, name) for name in _AS_ASKED},
    )
    return with_steps(recipe, options, options.train.steps or max(2, options.drops))


def with_steps(recipe: Recipe, options: InheritOptions, steps: int) -> Recipe:
    """Return the recipe with `steps` steps a round, and what follows from their number."""
    train = dataclasses.replace(
        options.train,
        steps=steps,
        eval_every=options.train.eval_every or math.ceil(steps / _EVALUATIONS),
        distill=DistillConfig(),
    )
    warmup = 0.0 if options.optimizer.warmup_steps else options.warmup
    return dataclasses.replace(recipe, train=train, optimizer=options.optimizer, warmup=warmup)


def _ordered(diagnosed: Diagnosed, options: InheritOptions, num_layers: int) -> list[int]:
    by = cast(By, options.choose)
    return ordered(diagnosed, by, num_layers, pinned=options.pinned, gaps=options.gaps)


def lasting(source: str) -> str:
    """Return a path, a glob or a mixture of them that holds from any folder; a name as it is."""
    domains = mixture_of(source)
    if domains is not None:
        parts = [(each.name, lasting(each.source), each.weight) for each in domains]
        return f"{MIXTURE}(parts={parts!r})"
    there = source and (Path(source).exists() or glob.glob(source, recursive=True))
    return str(Path(source).resolve()) if there else source


_RESERVED = 0.06
"""Share of the time for checkpoints, samples and the page."""
_EVALUATIONS = 5
"""Evaluations of a round after its start, unless train.eval_every says otherwise."""
_FEWEST = 5


@dataclass(frozen=True)
class ArmCost:
    """The cost of one arm, in seconds."""

    name: str
    step: float
    evaluation: float
    share: float
    """Its steps over those of a round."""
    parts: int = 1
    """Runs that divide the steps of a round, each evaluated at its start and at its end."""


def steps_within(
    costs: Sequence[ArmCost], seconds: float, *, every: int = 0, before: float = 0.0
) -> int:
    """Return the steps S of a round such that all arms' steps and evaluations take `seconds`.

    Σ share · (S · step + E · evaluation) = seconds, less `_RESERVED`, with E = k (1 + ⌈5 / k⌉)
    evaluations of a round in k runs, or E = 2 k + S / `every` where that many steps lie between
    two of them. `before` are the seconds of what comes before the first step, which `seconds` do
    not count; the error names them.

    Raises:
        WakefulError: not even a few steps fit.
    """
    fixed, step = _fixed_and_step(costs, every)
    steps = int((seconds * (1 - _RESERVED) - fixed) / step)
    if steps < _FEWEST:
        parts = ", ".join(f"{c.name} {c.step:.1f} s a step" for c in costs)
        raise WakefulError(
            f"{max(0.0, seconds + before) / 60:.3g} minutes are enough for {max(0, steps)} steps "
            f"({parts}; {fixed:.0f} s of evaluations and {before:.0f} s of reading, choosing and "
            "bridging come before): give more --minutes, fewer --baseline, a smaller --batch_size, "
            "less validation text or fewer --bridge.tokens"
        )
    return steps


def _fixed_and_step(costs: Sequence[ArmCost], every: int = 0) -> tuple[float, float]:
    """Return the seconds that all arms take whatever their steps, and for each step of a round."""

    def evaluations(parts: int) -> int:
        return 2 * parts if every else parts * (1 + math.ceil(_EVALUATIONS / parts))

    fixed = sum(c.evaluation * evaluations(c.parts) * max(1, c.share) for c in costs)
    step = sum(c.share * (c.step + (c.evaluation / every if every else 0)) for c in costs)
    return fixed, step


_TELLING = 0.1
"""Nats: the difference between two heirs that a budget should be able to tell."""
_MOVING = 20
"""Steps: in this many, half of SmolLM2 with a bridge moves by a third of a nat (findings.md)."""
_WINDOWS = 20
"""A standard error over n windows is itself known to 1 / √(2 (n − 1)): over these to a sixth."""
_MOST_HELD_OUT = 0.5
"""Share of a text beyond which it is better to give more text than to hold out more of it."""


def doubts(
    recipe: Recipe,
    reference: pl.DataFrame,
    costs: Sequence[ArmCost],
    text: DataConfig,
    data: Data,
    *,
    before: float = 0.0,
) -> list[str]:
    """Return why a budget cannot tell heirs from noise, and which could; empty where it can.

    `reference` has the reference's loss in every validation window. Its standard error over n
    windows stands for those of differences, which are smaller, and falls with √n. `text` is what
    was asked for and `data` what it came to; `before` is as for `steps_within`.
    """
    found = []
    _, error = mean_loss(reference)
    windows, tokens = len(reference), int(reference["tokens"].sum())
    said = f"the validation text has {tokens:,} tokens in"
    if windows < 2:
        enough = _WINDOWS * recipe.train.length
        found.append(
            f"{said} one window, which gives no error at all; {enough:,} tokens in {_WINDOWS} "
            f"windows would ({_more(text, data, enough / tokens)})"
        )
    elif error > _TELLING:
        times = (error / _TELLING) ** 2
        found.append(
            f"{said} {windows} windows, over which the reference's own loss is known to ± "
            f"{error:.2f} nats: smaller differences between heirs may be noise; "
            f"{times * tokens:,.0f} tokens would tell {_TELLING:g} nats "
            f"({_more(text, data, times)})"
        )
    steps, drops = recipe.train.steps, recipe.drops
    if steps < _MOVING * drops:
        fixed, step = _fixed_and_step(costs)
        seconds = len(recipe.of_seeds()) * (fixed + _MOVING * drops * step) / (1 - _RESERVED)
        time = f", some {math.ceil((seconds + before) / 60)} minutes here," if costs else ""
        part, whole = "", ""
        if drops > 1:
            part, whole = f", the share of each of {drops} drops,", f" for all {drops}"
        found.append(
            f"after {steps // drops} steps{part} a model has hardly changed from its start: "
            f"{_MOVING * drops}{whole}{time} are the fewest that tell what training brings "
            "(--steps, --minutes)"
        )
    return found


def _more(text: DataConfig, data: Data, times: float) -> str:
    """Return the option that makes a validation set `times` times as large."""
    given, again = data.given(text.source), ""
    generated = given and "sampled" in data.info
    if given:
        again = f"wakeful data {'generate' if generated else 'prepare'} again, with "
    if data.info.get("validation_source"):
        return f"{again}a longer --validation_{'source' if given else 'text'}"
    settings = data.info.get("settings")  # which older folders lack
    fraction = settings.get("validation_fraction") if isinstance(settings, dict) else None
    if not isinstance(fraction, float):
        return f"{again}a larger --validation_fraction"
    if times * fraction > _MOST_HELD_OUT:
        return f"{again}more --tokens" if generated else f"{again}more text"
    return f"{again}--validation_fraction {times * fraction:.2g}"


def measure_costs(
    recipe: Recipe, reference: Decoder, data: Data, progress: Passed = unseen
) -> list[ArmCost]:
    """Take two steps with a model of each arm, the first not counted, and evaluate one batch.

    `progress` hears of every arm. Later rounds are counted at the first's cost a layer, and all the
    rounds that may be needed.
    """
    total = reference.config.num_layers
    shares, arms = _shares(recipe, total), trained_arms(recipe)
    thawed = {name for name, p in reference.named_parameters() if p.requires_grad}
    training = reference.training
    setting = setting_of(recipe, reference, recipe.layer_map(0))
    costs: list[ArmCost] = []
    for name, arm in arms.items():
        progress(len(costs), len(arms))
        start = arm.stand_in(setting)
        config = arm_config(recipe, name, start, 2, learning(recipe, arm, setting))
        step, evaluation = _timed(config, start, reference, data)
        parts = recipe.drops if name == "heir" else 1
        if arm.second is not None:
            parts, second = 2, arm.second(setting, start)
            config = arm_config(recipe, name, second, 2)
            later, evaluation = _timed(config, second, reference, data)
            step = (step + later) / 2
        costs.append(ArmCost(name, step, evaluation, shares[name], parts))
    progress(len(arms), len(arms))
    # A teacher is frozen, and this one may be a user's own module.
    reference.to("cpu").train(training)
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(name in thawed)
    return costs


def _shares(recipe: Recipe, total: int) -> dict[str, float]:
    """Return each arm's steps over those of a round, a step being one of the first heir's depth.

    `total` is the number of the reference's layers.
    """
    depth = len(recipe.layers)
    grown = [recipe.depth(number) / depth for number in range(recipe.rounds)]
    left_out = (total - depth) / depth  # at an even pace
    shares = {"heir": sum(grown) + left_out * (1 - 1 / recipe.drops) / 2}
    for name in recipe.baselines:
        baseline = baseline_of(name)
        # A student that grows goes through every round, and its baselines take as many steps.
        whole = recipe.grow_from == "student" or baseline.all_rounds
        shares[name] = (len(grown) if whole else 1) * grown[-1] * baseline.times
    return shares


def _timed(config: Config, decoder: Decoder, reference: Decoder, data: Data) -> tuple[float, float]:
    """Return the seconds of the second of two steps, and of an evaluation."""
    device = choose_device(config.train.device)
    training = Training(config, data, device, given=decoder, teacher=reference.to(device))
    training.decoder.train()
    taken = 0.0
    for step in range(2):
        began = time.perf_counter()
        training.gradients(training.batches.batch(step))
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        training.decoder.head.weight[0, 0].item()  # a GPU has then done what it was asked
        taken = time.perf_counter() - began
    return taken, evaluation_seconds(training.decoder, training.windows, training.mixed)


@torch.no_grad()
def evaluation_seconds(
    decoder: Decoder, windows: ValidationWindows, mixed: AbstractContextManager[object]
) -> float:
    """Return the seconds that the whole validation set takes, by its first batch."""
    device = decoder.head.weight.device
    decoder.eval()
    inputs, targets = (part.to(device) for part in windows.batch(0))
    began = 0.0
    for _ in range(1 if device.type == "cpu" else 2):  # a GPU loads its kernels the first time
        began = time.perf_counter()
        with mixed:
            decoder.loss(inputs, targets).item()
    return (time.perf_counter() - began) * windows.num_windows / len(inputs)


def foreseen(
    options: InheritOptions, recipe: Recipe, reference: Decoder, data: Data
) -> dict[str, float]:
    """Return very roughly the seconds of every kind of work, in order, by its name.

    Each in forwards of the reference over its tokens, one of which is timed, in the precision of
    the training; a backward pass is two. A recipe by the minute has no training here.
    """
    config = config_of_reference(recipe, reference)
    device, windows = choose_device(config.train.device), data.windows(config)
    taken = evaluation_seconds(reference.to(device), windows, autocast(config.train, device))
    reference.to("cpu")
    one, total = taken / windows.num_predicted, reference.config.num_layers
    seeds = len(recipe.of_seeds())
    looks, dropped = looked_at(options), total - len(recipe.layers)
    diagnosing = PASSES * options.diagnose_sequences * options.diagnose_length if looks else 0
    choosing = 0.0
    if looks and options.choose == "bridge" and not options.blocks and dropped:
        # All tokens once; then for each run a layer's matrix, and the layers behind it on a few.
        solved = min(SOLVED_ON, options.bridge.tokens)
        runs = (total - dropped) / 2 + 2
        choosing = solved + MEASURED_ON + runs * (2 * solved / total + MEASURED_ON / 2)
    return {
        "diagnosing": one * diagnosing,
        "choosing": one * choosing,
        "evaluating": taken * (1 + 2 * (1 - dropped / total) * (options.heal.by == "none")),
        "closed forms": one * seeds * solved_on(recipe, total, data),
        "training": seeds * _trained(options, recipe, total, one, taken),
    }


def _trained(
    options: InheritOptions, recipe: Recipe, total: int, one: float, evaluation: float
) -> float:
    """Return the seconds of one seed's training, with its evaluations; 0 of one by the minute."""
    steps, train, depth = options.train.steps, recipe.train, len(recipe.layers) / total
    if not steps:
        return 0.0
    taught = {
        name
        for name, arm in trained_arms(recipe).items()
        if arm.distil or (arm.heals and recipe.heal.by == "reference")
    }
    batch = one * train.batch_size * train.length
    costs = [
        ArmCost(name, batch * (3 * depth + (name in taught)), depth * evaluation, share)
        for name, share in _shares(recipe, total).items()
    ]
    fixed, step = _fixed_and_step(costs, train.eval_every)
    return fixed + steps * step
