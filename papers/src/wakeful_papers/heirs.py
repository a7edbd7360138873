"""Baselines of inheritances: other starts than an heir's for the same training.

When Attention Collapses, appendix B, tables 1, 2 and 4. The reference has N layers, an heir n.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import polars as pl
import torch

from wakeful.config.reading import LENGTH
from wakeful.config.schema import DistillConfig
from wakeful.config.tables import to_table
from wakeful.data.preparing import load_data
from wakeful.errors import Diverged, WakefulError, did_you_mean
from wakeful.inheritance.blocks import inherit_blocks, random_like_heir
from wakeful.inheritance.layers import LayerMap, first
from wakeful.inheritance.outcome import Arm, compare_arms, read_inheritance
from wakeful.inheritance.reading import CHOOSING_SEQUENCES
from wakeful.inheritance.recipe import Recipe, read_recipe
from wakeful.inheritance.rounds import StageRunner
from wakeful.inheritance.solving import spread_windows
from wakeful.inheritance.stages import FinishedStage, FinishedStages, TrainingStage
from wakeful.inheritance.tool import inherit as inherit_reference
from wakeful.loading.load import read_decoder
from wakeful.loading.model import Model
from wakeful.model.decoder import Decoder
from wakeful.model.evaluating import evaluating
from wakeful.probes.rank import Ranks
from wakeful.probes.watch import watch
from wakeful.runs.run import Run, is_done, read_record, read_windows
from wakeful.terminal.display import DisplayFactory

Copy = Literal["all", "attention", "mlp", "without_norms", "blocks", "embeddings"]
"""The inherited parts: everything; of the blocks the attention or the feed-forward network, each
with the norm before it, or both without their norms (table 2); the blocks alone, without
embeddings, positions, final norm and head; or those alone. The rest starts at random. The paper's
text copies all; its code leaves positions and final norm at random."""


def middle(num_layers: int, *, of: int) -> LayerMap:
    """Return n contiguous layers around the middle (table 4's 5–8 of 12, counted from 1)."""
    start = (of - num_layers) // 2
    return LayerMap(tuple(range(start, start + num_layers)), "middle")


def last(num_layers: int, *, of: int) -> LayerMap:
    """Return the last n layers (table 4's 9–12 of 12, counted from 1)."""
    return LayerMap(tuple(range(of - num_layers, of)), "last")


def alternate(num_layers: int, *, of: int) -> LayerMap:
    """Return every second layer, as DistilBERT does (appendix B).

    A target of less than half the layers takes them evenly spread. One of more than half takes all
    even layers and for the other r those from N − 2 − r to N − 3 once more: the paper's 16 of 24,
    counted from 0, are 0, 2 … 22 and 18, 19, 20, 21.
    """
    even = range(0, of, 2)
    if num_layers < len(even):
        return LayerMap(tuple(i * of // num_layers for i in range(num_layers)), "alternate")
    rest = num_layers - len(even)
    start = max(0, of - 2 - rest)
    return LayerMap((*even, *range(start, start + rest)), "alternate")


def twice(num_layers: int, *, of: int) -> LayerMap:
    """Return the first ⌈n/2⌉ layers and then the same again, cut to n (hybrid stacking)."""
    half = -(-num_layers // 2)
    if half > of:
        raise WakefulError(f"{half} layers are more than the {of} that are there")
    return LayerMap(tuple(i % half for i in range(num_layers)), "stacked")


def laziest(ranks: Sequence[float], num_layers: int) -> LayerMap:
    """Return the n consecutive layers with the lowest mean rank, the last ones of a tie."""
    starts = range(len(ranks) - num_layers + 1)
    start = min(starts, key=lambda s: (sum(ranks[s : s + num_layers]), -s))
    return LayerMap(tuple(range(start, start + num_layers)), "lazy")


@dataclass(frozen=True)
class Setting:
    """The reference and the heir's options, from which baselines of an inheritance start."""

    reference: Decoder
    layers: LayerMap
    """The reference's layers that the last heir has."""
    seed: int
    lazy: LayerMap | None = None
    """The n consecutive layers with the lowest mean rank, if a baseline needs them."""
    route: str = ""
    normalizer: str = ""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @torch.no_grad()
    def inherit(self, layers: LayerMap, *, copy: Copy = "all") -> Decoder:
        """Return a target with the parts `copy` of these layers, the rest at random."""
        options = {"route": self.route, "normalizer": self.normalizer, "seed": self.seed}
        target = inherit_blocks(self.reference, layers, **options)
        if copy != "all":
            random = random_like_heir(self.reference, layers.sources, **options)
            for name, tensor in target.named_parameters():
                if not is_copied(name, copy):
                    tensor.copy_(random.get_parameter(name))
        return target

    def at_random(self, num_layers: int) -> Decoder:
        """Return a target with the shape of the heir's first layers and random weights."""
        return random_like_heir(
            self.reference, self.layers.sources[:num_layers], route=self.route,
            normalizer=self.normalizer, seed=self.seed,
        )  # fmt: skip

    def everything(self) -> Decoder:
        """Return a target with all of the reference's layers."""
        depth = self.reference.config.num_layers
        return self.inherit(first(depth, of=depth))


def is_copied(name: str, copy: Copy) -> bool:
    """Return True if the parts `copy`, which are not "all", include a decoder's parameter."""
    if not name.startswith("blocks."):
        return copy != "blocks"
    child = name.split(".")[2]
    half = child.partition("_")[0]  # "mlp" of "mlp" and of the norm "mlp_norm"
    return copy in ("blocks", half) or (copy == "without_norms" and child == half)


@dataclass(frozen=True)
class Baseline:
    """A baseline of an inheritance."""

    summary: str
    start: Callable[[Setting], Decoder]
    """The model that its training, or the first of two stages, starts from."""
    second: Callable[[Setting, Decoder], Decoder] | None = None
    """The model of a second stage, from the model that the first has trained."""
    times: int = 1
    """Its steps, as a multiple of those of the last round, or with `all_rounds` of all."""
    all_rounds: bool = False
    """True if it takes as many steps as all rounds of growth together, not only the last."""
    distill: Literal["", "sum", "mean"] = ""
    """The form of KL over the vocabulary in its loss; empty for cross-entropy alone."""
    from_random: bool = False
    """True if none of its weights come from the reference."""


def stack(setting: Setting, trained: Decoder) -> Decoder:
    """Return the trained ⌈n/2⌉ layers twice, cut to n (Gong et al. 2019)."""
    layers = twice(setting.num_layers, of=trained.config.num_layers)
    return inherit_blocks(trained, layers, seed=setting.seed)


@torch.no_grad()
def half_width(reference: Decoder, *, residual: bool) -> Decoder:
    """Return all layers with the first half of their heads and feed-forward units.

    With `residual` the first half of the residual stream's channels too, which is the paper's
    (table 11 halves the hidden size). Every matrix is the leading corner of the reference's. Odd
    numbers are rounded up and grouped heads stay whole: G key/value heads become ⌈G/2⌉ with all
    their query heads, so that the baseline is never less than half.
    """
    config, shape = reference.config, reference.config.shape
    groups = -(-shape.num_kv_heads // 2)
    narrow = dataclasses.replace(
        config,
        num_heads=groups * (shape.num_heads // shape.num_kv_heads),
        num_kv_heads=groups,
        head_width=shape.head_width,
        mlp_width=-(-config.mlp_width // 2),
        width=-(-config.width // 2) if residual else config.width,
    )
    target = Decoder(narrow).to(reference.head.weight.dtype)
    for name, tensor in target.named_parameters():
        corner = tuple(slice(0, size) for size in tensor.shape)
        tensor.copy_(reference.get_parameter(name)[corner])
    return target


def _random_baseline(summary: str, *, halves: bool = False, **more: Any) -> Baseline:
    """Return a baseline without inheritance; with `halves` half its layers first, then `stack`."""

    def start(setting: Setting) -> Decoder:
        return setting.at_random(-(-setting.num_layers // (2 if halves else 1)))

    return Baseline(summary, start, stack if halves else None, from_random=True, **more)


def _inherit(
    summary: str, choose: Callable[[Setting], LayerMap], copy: Copy = "all", **more: Any
) -> Baseline:
    """Return a baseline that inherits the parts `copy` of the layers that `choose` returns."""
    return Baseline(summary, lambda setting: setting.inherit(choose(setting), copy=copy), **more)


def _by_rule(rule: Callable[..., LayerMap]) -> Callable[[Setting], LayerMap]:
    return lambda setting: rule(setting.num_layers, of=setting.reference.config.num_layers)


def _own_layers(setting: Setting) -> LayerMap:
    return setting.layers


def _lazy_layers(setting: Setting) -> LayerMap:
    if setting.lazy is None:
        depth = setting.num_layers
        raise WakefulError(f"the reference has no run of {depth} layers: leave out baseline lazy")
    return setting.lazy


BASELINES: dict[str, Baseline] = {
    "random": _random_baseline("the same shape at random"),
    "random_twice": _random_baseline("the same shape at random, for twice the steps", times=2),
    "stacking": _random_baseline(
        "half the layers trained from random, then copied onto themselves", halves=True
    ),
    "full_stacking": _random_baseline(
        "stacking with all the steps before and all the steps after", halves=True, times=2
    ),
    "hybrid_stacking": _inherit("the reference's first n/2 layers twice", _by_rule(twice)),
    "half_width": Baseline(
        "all layers, half the heads, feed-forward units and channels",
        lambda s: half_width(s.everything(), residual=True),
    ),
    "half_heads": Baseline(
        "all layers, half the heads and feed-forward units",
        lambda s: half_width(s.everything(), residual=False),
    ),
    "at_once": _inherit(
        "the last heir's layers from the beginning, for as many steps as all rounds together",
        _own_layers,
        all_rounds=True,
    ),
    "distillation": _random_baseline(
        "random, trained on the reference's predictions, KL summed over the vocabulary",
        distill="sum",
    ),
    "distillation_mean": _random_baseline(
        "random, trained on the reference's predictions, KL averaged over the vocabulary",
        distill="mean",
    ),
    "distilbert": _inherit(
        "every second layer, trained on the reference's predictions",
        _by_rule(alternate),
        distill="sum",
    ),
    "first": _inherit("the first n layers", _by_rule(first)),
    "alternate": _inherit("every second layer", _by_rule(alternate)),
    "middle": _inherit("n layers around the middle", _by_rule(middle)),
    "last": _inherit("the last n layers", _by_rule(last)),
    "lazy": _inherit("the n neighboring layers of the lowest mean rank", _lazy_layers),
    "attention": _inherit("the heir's attention and its norms alone", _own_layers, "attention"),
    "mlp": _inherit("the heir's feed-forward networks and their norms alone", _own_layers, "mlp"),
    "without_norms": _inherit("the heir without its blocks' norms", _own_layers, "without_norms"),
    "blocks": _inherit(
        "the heir's blocks, with embeddings, positions, final norm and head at random",
        _own_layers,
        "blocks",
    ),
    "embeddings": _inherit(
        "the reference's embeddings, positions, final norm and head, with blocks at random",
        _own_layers,
        "embeddings",
    ),
    "middle_blocks": _inherit(
        "middle, with embeddings, positions, final norm and head at random",
        _by_rule(middle),
        "blocks",
    ),
    "last_blocks": _inherit(
        "last, with embeddings, positions, final norm and head at random", _by_rule(last), "blocks"
    ),
    "lazy_blocks": _inherit(
        "lazy, with embeddings, positions, final norm and head at random", _lazy_layers, "blocks"
    ),
    "reference": Baseline("the whole reference, trained further", lambda s: s.everything()),
}
"""Baselines by name."""


def find_baseline(name: str) -> Baseline:
    """Return the baseline of a name, or raise `WakefulError`."""
    if name not in BASELINES:
        raise WakefulError(
            f"baseline={name!r} is not one of {', '.join(BASELINES)}{did_you_mean(name, BASELINES)}"
        )
    return BASELINES[name]


@dataclass(frozen=True)
class HeirsAndBaselines:
    """baselines.json: the heirs and the baselines."""

    arms: tuple[Arm, ...]
    diverged: Mapping[str, str] = field(default_factory=dict)
    """The error message of each baseline that diverged; it has no arm."""


def inherit_with_baselines(
    source: str, options: Mapping[str, Any], baselines: Sequence[str], folder: Path,
    display: DisplayFactory,
) -> HeirsAndBaselines:  # fmt: skip
    """Return an inheritance's heirs and its baselines, heirs first.

    What the folder lacks is run first. `options` are those of `wakeful.inherit`, for one seed.
    Baselines are training runs in the folder on the heir's batches; baselines.json has all arms.
    A baseline that diverges is left out, and its error recorded.

    Raises:
        Diverged: an heir diverged.
    """
    if not (folder / "run.json").is_file():
        inherit_reference(source, display=display, **{**options, "out": folder})
    elif not is_done(folder):
        inherit_reference(resume=folder, display=display)
    record = folder / "baselines.json"
    if not record.is_file():
        heirs = _train_baselines(folder, baselines, display)
        Run(folder).write_json(record.name, to_table(heirs))
    return read_record(HeirsAndBaselines, record)


def _train_baselines(
    folder: Path, baselines: Sequence[str], display: DisplayFactory
) -> HeirsAndBaselines:
    recipe, loss = read_recipe(folder), read_inheritance(folder)[0].reference.loss
    reference = read_decoder(recipe.reference)
    runner = StageRunner(recipe, reference.decoder(), loss, folder, display)
    rounds = runner.carry_out().rounds  # they are finished, and only read
    lazy = bool({"lazy", "lazy_blocks"} & {*baselines})
    setting = Setting(
        reference.decoder(),
        LayerMap(rounds[-1].stage.layers, recipe.rule),
        seed=recipe.train.seed,
        lazy=_laziest(recipe, reference, len(rounds[-1].stage.layers)) if lazy else None,
        route=recipe.route,
        normalizer=recipe.normalizer,
    )
    heirs = [each.stage for each in rounds]
    finished: list[FinishedStage] = []
    diverged: dict[str, str] = {}
    with runner.resumable():
        for name in baselines:
            stages = baseline_stages(name, setting, recipe, heirs, folder)
            try:
                finished += [runner.run_stage(stage) for stage in stages]
            except Diverged as error:
                diverged[name] = str(error)
    outcome = FinishedStages(rounds, tuple(finished))
    arms = compare_arms(outcome, read_windows(folder / "reference.parquet"), loss)
    return HeirsAndBaselines(arms, diverged)


def _laziest(recipe: Recipe, reference: Model, num_layers: int) -> LayerMap:
    decoder = reference.decoder()
    length = min(LENGTH, decoder.config.context)
    tokens = spread_windows(load_data(recipe.data), CHOOSING_SEQUENCES, length, recipe.data)
    with evaluating(decoder), torch.inference_mode(), watch(decoder, Ranks()) as watcher:
        for row in tokens:
            decoder.hidden(row[None].to(decoder.head.weight.device))
    ranks = watcher.frame.filter(
        pl.col("head").is_null(), metric="rank", variant="paper", position="all"
    ).sort("layer")
    return laziest(ranks["value"].to_list(), num_layers)


def baseline_stages(
    name: str, setting: Setting, recipe: Recipe, heirs: Sequence[TrainingStage], folder: Path
) -> Iterator[TrainingStage]:
    """Yield a baseline's training stages, which depend on the last heir's depth and steps."""
    baseline, heir = find_baseline(name), heirs[-1]
    steps = heir.offset + heir.steps
    if baseline.all_rounds:
        steps = sum(stage.steps for stage in heirs)
    steps *= baseline.times
    distill = DistillConfig()
    if baseline.distill:
        distill = DistillConfig(teacher=recipe.reference, over=baseline.distill)
    origin = {"baseline": baseline.summary, "random": baseline.from_random}
    make = partial(TrainingStage, arm=name, summary=baseline.summary, origin=origin)
    start = partial(baseline.start, setting)
    start_second = baseline.second
    if start_second is None:
        yield make(name=name, steps=steps, start=start, objective=distill)
        return
    half = halfway_steps(steps, recipe.train.eval_every)
    yield make(name=f"{name}-1", steps=half, start=start)

    def second() -> Decoder:
        return start_second(setting, read_decoder(folder / f"{name}-1", dtype="auto").decoder())

    yield make(name=name, steps=steps - half, offset=half, start=second)


def halfway_steps(steps: int, eval_every: int) -> int:
    """Return the steps of a first half, rounded so that both are evaluated at the usual steps."""
    interval = min(eval_every or 1, steps // 2) or 1
    return max(interval, steps // 2 // interval * interval)
