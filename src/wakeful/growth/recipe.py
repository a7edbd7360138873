"""The recipe: inherit, train, evaluate, grow until parity (algorithm 1), and baselines beside it.

Every model is an ordinary training run in a folder of its own, so each can be resumed, reported,
generated from, diagnosed and inherited from again. What has been done is read from those folders
alone: a recipe continues wherever it was cut off.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from wakeful.config.schema import (
    BridgeConfig,
    Config,
    DataConfig,
    DistillConfig,
    HealConfig,
    LoraConfig,
    OptimizerConfig,
    SampleConfig,
    TrainConfig,
    WidthConfig,
)
from wakeful.config.tables import from_table, to_table
from wakeful.config.verbs import Copy, GrowFrom, Until
from wakeful.data.order import documents_of
from wakeful.data.tokens import PreparedData
from wakeful.device import choose_device
from wakeful.display import Shown
from wakeful.errors import Interrupted, WakefulError
from wakeful.growth.baselines import (
    Baseline,
    Distil,
    Setting,
    at_random,
    baseline_of,
    check_baselines,
    folder_of,
)
from wakeful.growth.bridge import Bridged, bridge, check_bridge, gaps, rebridge, stayed
from wakeful.growth.inherit import grow, inherit
from wakeful.growth.layers import LayerMap, first, from_order, laziest
from wakeful.growth.narrow import narrow, narrow_config
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import Decoder
from wakeful.runs.run import Run, refuse_link
from wakeful.training.loop import Initial, train
from wakeful.training.records import Summary
from wakeful.training.setup import autocast, check_parts


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
    """Most rounds."""
    until: Until = "parity"
    grow_from: GrowFrom = "reference"
    minutes: float = 0.0
    """No round begins after this many minutes of training. 0: no limit."""
    seeds: tuple[int, ...] = ()
    """Everything is trained with each; empty: with train.seed alone."""
    baselines: tuple[str, ...] = ()
    bridge: BridgeConfig = field(default_factory=lambda: BridgeConfig(map="none"))
    """Of the heirs; older recipes have none."""
    heal: HealConfig = field(default_factory=lambda: HealConfig(by="text"))
    """What the heirs learn from; in older recipes the text alone."""
    alpha: float = 0.6
    """Of the baselines that learn from the reference, as the temperature."""
    temperature: float = 1.0
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
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
                f"an heir whose layers are {self.rule!r} has no next layer to grow by: choose "
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
        """What an heir of these layers of the reference's `num_layers` is trained on."""
        heal = self.heal
        if heal.by == "text":
            return DistillConfig()
        return DistillConfig(
            teacher=self.reference, alpha=heal.alpha, temperature=heal.temperature,
            top_k=heal.top_k, rest=heal.rest, store=heal.store, hidden=heal.hidden,
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
        """What a baseline is trained on."""
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


def check_stages(recipe: Recipe, reference: Decoder) -> Config:
    """Raise what the training of any stage would raise; return the configuration of them all.

    Every model is made on the meta device, where weights take no memory.
    """
    with torch.device("meta"):
        blank = Decoder(reference.config)
    layers = recipe.layer_map(recipe.rounds - 1)
    setting = setting_of(recipe, blank, layers)
    left_out = recipe.width or gaps(recipe.layer_map(0), blank.config.num_layers)
    if "narrow" in recipe.baselines or (recipe.bridge.map != "none" and left_out):
        check_bridge(blank)
    heir = Baseline("", lambda s: timed_heir(recipe, s, layers))
    arms = [
        ("heir", heir, recipe.healing(layers, blank.config.num_layers), recipe.heal.lora),
        ("heir", heir, recipe.lesson("sum"), LoraConfig()),
    ]
    baselines = [(name, baseline_of(name)) for name in recipe.baselines]
    arms += [(name, arm, *learning(recipe, arm, setting)) for name, arm in baselines]
    for name, arm, lesson, lora in arms:
        stage = Stage(
            name, name, recipe.train.steps, 0, partial(arm.stand_in, setting), distill=lesson,
            lora=lora,
        )  # fmt: skip
        with torch.device("meta"):
            decoder = stage.start()
            if arm.second is not None:
                decoder = arm.second(setting, decoder)
        check_parts(stage_config(recipe, stage, decoder))
    whole = Stage("reference", "reference", recipe.train.steps, 0, lambda: reference)
    return stage_config(recipe, whole, reference)


@dataclass(frozen=True)
class Stage:
    """One training run of a recipe."""

    name: str
    """Its folder."""
    arm: str
    """The line of the comparison it belongs to."""
    steps: int
    offset: int
    """Steps that the arm has taken before it."""
    start: Callable[[], Decoder]
    layers: tuple[int, ...] = ()
    """The reference's layers that it took, where it took any by number."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    bridge: Callable[[Decoder], list[Bridged]] | None = None
    """Bridges the layers that it leaves out, once it has started."""


@dataclass(frozen=True)
class Finished:
    """A stage and the run it became."""

    stage: Stage
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
class Outcome:
    """The heir's rounds and the baselines' stages, in the order they ran."""

    rounds: tuple[Finished, ...]
    baselines: tuple[Finished, ...]


def carry_out(
    recipe: Recipe,
    reference: Decoder,
    *,
    loss: float,
    out: Path,
    shown: Shown,
    resume: Path | None = None,
) -> Outcome:
    """Train the heirs and the baselines below `out`, going on with what is there.

    `loss` is the reference's on the same validation set: parity is a final loss at or under it.
    `resume` is the inheritance's folder, where it is not `out`.

    Raises:
        Interrupted: a signal ended a run, which is saved.
    """
    try:
        rounds = list(_rounds(recipe, reference, loss, out, shown))
        stages = _stages(recipe, reference, rounds, out)
        baselines = [_finished(recipe, stage, out, shown) for stage in stages]
    except Interrupted:
        raise Interrupted(
            "stopped, and what was trained is saved",
            f"continue with: wakeful inherit --resume {resume or out}",
        ) from None
    return Outcome(tuple(rounds), tuple(baselines))


def _drops(recipe: Recipe, reference: Decoder, out: Path, shown: Shown) -> Iterator[Finished]:
    """Train an heir after each drop, from the one before it."""
    total, before, done = reference.config.num_layers, None, 0
    for layers, steps in recipe.parts(total):
        stage = Stage(
            name=f"heir-{len(layers)}",
            arm="heir",
            steps=steps,
            offset=done,
            start=partial(_dropped, recipe, reference, layers, before),
            layers=layers.sources,
            distill=recipe.healing(layers, total),
            lora=recipe.heal.lora,
            bridge=partial(_bridges, recipe, reference, layers, before),
        )
        before = _finished(recipe, stage, out, shown)
        done += steps
        yield before


def _dropped(
    recipe: Recipe, reference: Decoder, layers: LayerMap, before: Finished | None
) -> Decoder:
    if before is None:
        return _heir(recipe, reference, layers, None)
    student = read_decoder(before.run.path, dtype="auto").decoder()
    had = LayerMap(before.stage.layers, recipe.rule)
    return inherit(student, layers.within(had), seed=recipe.train.seed)


def _rounds(
    recipe: Recipe, reference: Decoder, loss: float, out: Path, shown: Shown
) -> Iterator[Finished]:
    if recipe.drops > 1:
        yield from _drops(recipe, reference, out, shown)
        return
    steps, spent = recipe.train.steps, 0.0
    grows_on = recipe.grow_from == "student" and recipe.rounds > 1
    before: Finished | None = None
    for number in range(recipe.rounds):
        layers = recipe.layer_map(number)
        grown = before if grows_on else None
        stage = Stage(
            name=f"heir-{len(layers)}",
            arm="heir" if grows_on else f"heir-{len(layers)}",
            steps=steps,
            offset=number * steps if grown else 0,
            start=lambda grown=grown, layers=layers: _heir(recipe, reference, layers, grown),
            layers=layers.sources,
            distill=recipe.healing(layers, reference.config.num_layers),
            lora=recipe.heal.lora,
            bridge=partial(_bridges, recipe, reference, layers, grown),
        )
        before = _finished(recipe, stage, out, shown)
        yield before
        spent += before.summary.seconds
        if recipe.until == "parity" and before.loss <= loss:
            return
        if recipe.minutes and spent >= 60 * recipe.minutes:
            return


def _heir(recipe: Recipe, reference: Decoder, layers: LayerMap, grown: Finished | None) -> Decoder:
    if grown is not None:
        student = read_decoder(grown.run.path, dtype="auto").decoder()
        before = LayerMap(grown.stage.layers, recipe.rule)
        return grow(student, before, reference, layers, copy=recipe.copy, seed=recipe.train.seed)
    donor = _narrowed(recipe, reference, recipe.width) if recipe.width else reference
    return inherit(
        donor, layers, copy=recipe.copy, route=recipe.route, normalizer=recipe.normalizer,
        seed=recipe.train.seed,
    )  # fmt: skip


def _narrowed(recipe: Recipe, reference: Decoder, width: WidthConfig) -> Decoder:
    """Return the reference with fewer heads and channels, solved on the text's beginning."""
    device = choose_device(recipe.train.device)
    tokens, numbers = _text(recipe, recipe.width.tokens)
    reference.to(device)
    donor = narrow(
        reference, width, tokens, recipe.bridge, documents=numbers,
        autocast=autocast(recipe.train, device),
    ).cpu()  # fmt: skip
    reference.to("cpu")
    return donor


def timed_heir(recipe: Recipe, setting: Setting, layers: LayerMap) -> Decoder:
    """Return a model of an heir's shape, to look at or to time, without what it takes to make."""
    if recipe.width:
        return at_random(setting, len(layers))
    return setting.inherit(layers, copy=recipe.copy)


def _text(recipe: Recipe, most: int) -> tuple[Int[Tensor, "B L"], Int[Tensor, "B L"] | None]:
    """Return at most so many tokens of the training text's beginning, to solve on, and their
    documents' numbers where these do not see each other.
    """
    data, length = PreparedData.open(recipe.data.source), recipe.train.length
    most = min(most, recipe.data.max_tokens or data.train.num_tokens)
    tokens = beginning(data, max(1, most // length), length, bos=recipe.data.bos)
    return tokens, documents(tokens, data, recipe.data)


def documents(
    tokens: Int[Tensor, "B L"], data: PreparedData, config: DataConfig
) -> Int[Tensor, "B L"] | None:
    """Return the number of each token's document, None where attention crosses from one to the
    next.
    """
    return None if config.cross_documents else documents_of(tokens, data.train.end_of_text)


def beginning(data: PreparedData, rows: int, length: int, *, bos: bool) -> Int[Tensor, "B L"]:
    """Return the first rows of the training text, at most as many as there are.

    With `bos` each begins as training's windows then do: with BOS in the place of its first token.
    """
    rows = min(rows, data.train.num_tokens // length)
    tokens = torch.from_numpy(data.train.tokens[: rows * length].astype("int64"))
    tokens = tokens.view(rows, length)
    if bos:
        tokens[:, 0] = data.tokenizer.begin
    return tokens


def _bridges(
    recipe: Recipe, reference: Decoder, layers: LayerMap, before: Finished | None, heir: Decoder
) -> list[Bridged]:
    """Bridge an heir's gaps that the one `before` lacked, on the training text's beginning.

    Return all of its bridges in order of depth, with those that stayed.
    """
    if recipe.bridge.map == "none":
        return []
    tokens, numbers = _text(recipe, recipe.bridge.tokens)
    device = choose_device(recipe.train.device)
    reference.to(device)
    heir.to(device)
    context = autocast(recipe.train, device)
    if before is None:
        found = bridge(
            heir, reference, layers, tokens, recipe.bridge, documents=numbers, autocast=context
        )
    else:
        had = LayerMap(before.stage.layers, recipe.rule)
        found = rebridge(
            heir, reference, layers, had, tokens, recipe.bridge, documents=numbers,
            autocast=context,
        )  # fmt: skip
        found += stayed(before.bridges, layers, reference.config.num_layers)
        found.sort(key=lambda one: one.first)
    reference.to("cpu")
    heir.to("cpu")
    return found


def _stages(
    recipe: Recipe, reference: Decoder, rounds: list[Finished], out: Path
) -> Iterator[Stage]:
    """The baselines' stages: the last heir's depth, and as many steps as went into it, so many
    times as many, or as many as all rounds took.
    """
    last = rounds[-1].stage
    into_it, in_all = last.offset + last.steps, sum(each.stage.steps for each in rounds)
    setting = setting_of(recipe, reference, LayerMap(last.layers, recipe.rule))
    for name in recipe.baselines:
        steps = in_all if baseline_of(name).all_rounds else into_it
        yield from _baseline(recipe, name, setting, steps, out)


def setting_of(recipe: Recipe, reference: Decoder, layers: LayerMap) -> Setting:
    """Return what the baselines of an heir of these layers may use."""
    return Setting(
        reference,
        layers,
        seed=recipe.train.seed,
        lazy=laziest(recipe.ranks, len(layers)) if recipe.ranks else None,
        route=recipe.route,
        normalizer=recipe.normalizer,
        shape=narrow_config(reference.config, recipe.width) if recipe.width else None,
        copy=recipe.copy,
        narrowed=partial(_narrowed, recipe, reference),
    )


def learning(
    recipe: Recipe, baseline: Baseline, setting: Setting
) -> tuple[DistillConfig, LoraConfig]:
    """Return what a baseline is trained on, and with which adapters."""
    if not baseline.heals:
        return recipe.lesson(baseline.distil), LoraConfig()
    total = setting.reference.config.num_layers
    layers = setting.layers if baseline.bridged else first(total, of=total)
    return recipe.healing(layers, total), recipe.heal.lora


def _baseline(
    recipe: Recipe, name: str, setting: Setting, steps: int, out: Path
) -> Iterator[Stage]:
    baseline, folder = baseline_of(name), folder_of(name)
    start, then = partial(baseline.start, setting), baseline.second
    steps *= baseline.times
    if then is None:
        lesson, lora = learning(recipe, baseline, setting)
        solved = partial(_bridges, recipe, setting.reference, setting.layers, None)
        yield Stage(
            folder, name, steps, 0, start, distill=lesson, lora=lora,
            layers=setting.layers.sources if baseline.bridged else (),
            bridge=solved if baseline.bridged else None,
        )  # fmt: skip
        return
    before, half = out / f"{folder}-1", half_way(recipe, steps)
    yield Stage(before.name, name, half, 0, start)
    yield Stage(
        folder, name, steps - half, half,
        lambda: then(setting, read_decoder(before, dtype="auto").decoder()),
    )  # fmt: skip


def half_way(recipe: Recipe, steps: int) -> int:
    """Return the steps of a first half, so that both halves are evaluated where others are."""
    every = min(recipe.train.eval_every or 1, steps // 2) or 1
    return max(every, steps // 2 // every * every)


def _finished(recipe: Recipe, stage: Stage, out: Path, shown: Shown) -> Finished:
    """Return the stage's run: the one that is there, continued if need be, or a new one."""
    place = out / stage.name
    refuse_link(place)
    if (place / "run.json").is_file():
        run = Run.open(place)
        if run.header.status != "done":
            with shown(stage.name) as show:
                run = train(run.config, place, resume=True, show=show)
        return Finished(stage, run)
    decoder = stage.start()
    origin = {
        "reference": recipe.reference,
        "arm": stage.arm,
        "offset": stage.offset,
        "layers": list(stage.layers),
    }
    if stage.bridge is not None:
        with shown(stage.name) as show:
            show.note("bridging the layers left out")
            origin["bridges"] = [to_table(found) for found in stage.bridge(decoder)]
    config = stage_config(recipe, stage, decoder)
    with shown(stage.name) as show:
        run = train(config, place, initial=Initial(decoder, origin), show=show)
    return Finished(stage, run)


def stage_config(recipe: Recipe, stage: Stage, decoder: Decoder) -> Config:
    """Return the configuration of a stage's run."""
    warmup = min(recipe.optimizer.warmup_steps, stage.steps)
    return Config(
        name=stage.name,
        model=decoder.config,
        data=dataclasses.replace(recipe.data, first_batch=stage.offset),
        optimizer=dataclasses.replace(recipe.optimizer, warmup_steps=warmup),
        train=dataclasses.replace(
            recipe.train, steps=stage.steps, distill=stage.distill, lora=stage.lora
        ),
        sample=recipe.sample,
    )
