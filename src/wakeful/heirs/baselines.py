"""Baselines of an heir: other starts for the same training (appendix B, tables 1, 2, 4).

N layers in the reference, n in the target.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from wakeful.config.model import ModelConfig
from wakeful.config.schema import WidthConfig
from wakeful.config.verbs import Copy
from wakeful.display import Passed, unseen
from wakeful.errors import WakefulError
from wakeful.heirs.inherit import inherit, target_config
from wakeful.heirs.layers import LayerMap, alternate, first, last, middle, twice
from wakeful.heirs.narrow import narrow_config
from wakeful.model.decoder import Decoder
from wakeful.model.initialize import initialize
from wakeful.training.size import parameters_of
from wakeful.variants import build_call


@dataclass(frozen=True)
class Setting:
    """The setting of every baseline: the reference, the heir's depth and parts, and a seed."""

    reference: Decoder
    layers: LayerMap
    """The heir's own blocks."""
    seed: int
    lazy: LayerMap | None = None
    """The laziest run of n layers, where there is one and a baseline asked for it."""
    route: str = ""
    normalizer: str = ""
    shape: ModelConfig | None = None
    """The reference with the heir's heads and channels, where those are fewer."""
    copy: Copy = "all"
    """The parts of a block that the heir takes."""
    narrowed: Callable[..., Decoder] | None = None
    """Returns the reference with such a `WidthConfig`, telling `progress`; see `heirs.narrow`."""
    progress: Passed = unseen

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def inherit(self, layers: LayerMap, *, copy: Copy = "all") -> Decoder:
        """Return a target with other blocks, or other parts of them, than the heir's."""
        return inherit(
            self.reference, layers, copy=copy, route=self.route, normalizer=self.normalizer,
            seed=self.seed,
        )  # fmt: skip

    def everything(self) -> Decoder:
        """Return a target of all the reference's layers."""
        depth = self.reference.config.num_layers
        return self.inherit(first(depth, of=depth))


StartMaker = Callable[[Setting], Decoder]
Distil = Literal["", "sum", "mean"]


@dataclass(frozen=True)
class Baseline:
    """One line of a comparison."""

    summary: str
    start: StartMaker
    """The model its training starts from; of two stages, the first."""
    second: Callable[[Setting, Decoder], Decoder] | None = None
    """The model of the second half of its training, from the trained first."""
    times: int = 1
    """Its steps, as a multiple of the heir's."""
    all_rounds: bool = False
    """Whether it takes as many steps as all rounds of growth together, not as the last alone."""
    distil: Distil = ""
    """The form of KL in its loss; empty for cross-entropy alone."""
    heals: bool = False
    """Whether it is trained as the heir is, instead."""
    bridged: bool = False
    """Whether the layers that the heir leaves out are bridged."""
    looks: StartMaker | None = None
    """A model of the shape of `start`'s, where that takes long to make."""
    from_random: bool = False
    """Whether no weight of it comes from the reference."""

    def stand_in(self, setting: Setting) -> Decoder:
        """Return a model of the start's shape, to look at or to time."""
        return (self.looks or self.start)(setting)

    def __call__(self, setting: Setting) -> Decoder:
        return self.start(setting)


def at_random(setting: Setting, num_layers: int) -> Decoder:
    """Return a target of as many of the heir's first layers, with nothing inherited."""
    config = setting.shape or setting.reference.config
    return _fresh(setting, config, setting.layers.sources[:num_layers])


def _fresh(setting: Setting, config: ModelConfig, sources: Sequence[int]) -> Decoder:
    decoder = Decoder(_target(setting, config, sources))
    return initialize(decoder.to(setting.reference.head.weight.dtype), setting.seed)


def narrow_shares(setting: Setting) -> WidthConfig:
    """Return the shares of heads and channels with which all layers have the heir's parameters.

    Of G groups of heads and C channels, g and c remain: for each g the most channels that fit, and
    of these pairs the one with the least |g/G − c/C|.

    Raises:
        WakefulError: one head and one channel a layer are too many, the heir has all layers, or the
            reference cannot be narrowed.
    """
    config, depth = setting.reference.config, setting.reference.config.num_layers
    if len(setting.layers) >= depth:
        raise WakefulError(
            "baseline narrow sets width against depth, and the heir has all layers: keep fewer, or "
            "leave it out"
        )
    groups, channels = config.shape.num_kv_heads, config.mlp_width
    budget = parameters_of(_target(setting, setting.shape or config, setting.layers.sources))

    def size(g: int, c: int) -> int:
        shares = WidthConfig(heads=g / groups, mlp=c / channels)
        return parameters_of(_target(setting, narrow_config(config, shares), range(depth)))

    least = size(1, 1)
    per_group = size(2, 1) - least if groups > 1 else 0
    per_channel = size(1, 2) - least if channels > 1 else 1
    fitting: list[tuple[float, int, int]] = []
    for g in range(1, groups + 1):
        c = min(channels, 1 + (budget - least - (g - 1) * per_group) // per_channel)
        if c >= 1:
            fitting.append((abs(g / groups - c / channels), g, c))
    if not fitting:
        raise WakefulError(
            f"baseline narrow: {depth} layers of one group of heads and one channel have "
            f"{least:,} parameters, and the heir has {budget:,}: keep more layers, or leave it out"
        )
    _, g, c = min(fitting)
    return WidthConfig(heads=g / groups, mlp=c / channels)


def _target(setting: Setting, config: ModelConfig, sources: Sequence[int]) -> ModelConfig:
    return target_config(config, tuple(sources), route=setting.route, normalizer=setting.normalizer)


def _narrow(setting: Setting) -> Decoder:
    assert setting.narrowed is not None
    donor = setting.narrowed(narrow_shares(setting), progress=setting.progress)
    return dataclasses.replace(setting, reference=donor).everything()


def _narrow_shape(setting: Setting) -> Decoder:
    config = narrow_config(setting.reference.config, narrow_shares(setting))
    return _fresh(setting, config, range(config.num_layers))


def stack(setting: Setting, trained: Decoder) -> Decoder:
    """Return the trained ⌈n/2⌉ layers twice, cut to n (Gong et al. 2019)."""
    layers = twice(setting.num_layers, of=trained.config.num_layers)
    return inherit(trained, layers, seed=setting.seed)


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


def _random(summary: str, *, halves: bool = False, **more: Any) -> Baseline:
    """Return a baseline that inherits nothing, or in `halves`: half its layers, then stacked."""

    def start(setting: Setting) -> Decoder:
        return at_random(setting, -(-setting.num_layers // (2 if halves else 1)))

    return Baseline(summary, start, stack if halves else None, from_random=True, **more)


def _taken(
    summary: str, choose: Callable[[Setting], LayerMap], copy: Copy = "all", **more: Any
) -> Baseline:
    """Return a baseline that inherits these layers, or these parts of them."""
    return Baseline(summary, lambda setting: setting.inherit(choose(setting), copy=copy), **more)


def _ranged(rule: Callable[..., LayerMap]) -> Callable[[Setting], LayerMap]:
    return lambda setting: rule(setting.num_layers, of=setting.reference.config.num_layers)


def _own(setting: Setting) -> LayerMap:
    return setting.layers


def _lazy(setting: Setting) -> LayerMap:
    if setting.lazy is None:
        depth = setting.num_layers
        raise WakefulError(f"the reference has no run of {depth} layers: leave out baseline lazy")
    return setting.lazy


BASELINES: dict[str, Baseline] = {
    "random": _random("the same shape at random"),
    "random_twice": _random("the same shape at random, for twice the steps", times=2),
    "stacking": _random(
        "half the layers trained from random, then copied onto themselves", halves=True
    ),
    "full_stacking": _random(
        "stacking with all the steps before and all the steps after", halves=True, times=2
    ),
    "hybrid_stacking": _taken("the reference's first n/2 layers twice", _ranged(twice)),
    "half_width": Baseline(
        "all layers, half the heads, feed-forward units and channels",
        lambda s: half_width(s.everything(), residual=True),
    ),
    "half_heads": Baseline(
        "all layers, half the heads and feed-forward units",
        lambda s: half_width(s.everything(), residual=False),
    ),
    "narrow": Baseline(
        "all layers, the most important heads and channels of the heir's number of parameters, "
        "healed as it is",
        _narrow,
        heals=True,
        looks=_narrow_shape,
    ),
    "at_once": Baseline(
        "the last heir's layers from the beginning, bridged, and healed for as many steps as all "
        "drops or rounds together",
        lambda s: s.inherit(s.layers, copy=s.copy),
        all_rounds=True,
        heals=True,
        bridged=True,
    ),
    "distillation": _random(
        "random, trained on the reference's predictions, KL summed over the vocabulary",
        distil="sum",
    ),
    "distillation_mean": _random(
        "random, trained on the reference's predictions, KL averaged over the vocabulary",
        distil="mean",
    ),
    "distilbert": _taken(
        "every second layer, trained on the reference's predictions",
        _ranged(alternate),
        distil="sum",
    ),
    "first": _taken("the first n layers", _ranged(first)),
    "alternate": _taken("every second layer", _ranged(alternate)),
    "middle": _taken("n layers around the middle", _ranged(middle)),
    "last": _taken("the last n layers", _ranged(last)),
    "lazy": _taken("the n neighboring layers of the lowest mean rank", _lazy),
    "attention": _taken("the heir's attention and its norms alone", _own, "attention"),
    "mlp": _taken("the heir's feed-forward networks and their norms alone", _own, "mlp"),
    "without_norms": _taken("the heir without its blocks' norms", _own, "without_norms"),
    "blocks": _taken(
        "the heir's blocks, with embeddings, positions, final norm and head at random",
        _own,
        "blocks",
    ),
    "embeddings": _taken(
        "the reference's embeddings, positions, final norm and head, with blocks at random",
        _own,
        "embeddings",
    ),
    "middle_blocks": _taken(
        "middle, with embeddings, positions, final norm and head at random",
        _ranged(middle),
        "blocks",
    ),
    "last_blocks": _taken(
        "last, with embeddings, positions, final norm and head at random", _ranged(last), "blocks"
    ),
    "lazy_blocks": _taken(
        "lazy, with embeddings, positions, final norm and head at random", _lazy, "blocks"
    ),
    "reference": Baseline("the whole reference, trained further", lambda s: s.everything()),
}
"""By name, in the order that reports list them."""


def baseline_of(expression: str, *, imports: bool = False) -> Baseline:
    """Return the baseline that an expression names: one of ours, or a user's own.

    `my_module:start(k=2)` is a function of a `Setting` and its options, `my_module:MINE` a
    `Baseline`. `imports` lets the module be imported: only for what the user wrote.

    Raises:
        WakefulError: see `wakeful.variants.build_call`.
    """
    call = build_call("baseline", BASELINES, expression, folder="heirs", imports=imports)
    if isinstance(call.func, Baseline):
        return call.func
    return Baseline((inspect.getdoc(call.func) or expression).split("\n", 1)[0], call)


def folder_of(expression: str) -> str:
    """Return the name of the folder of a baseline's run."""
    return re.sub(r"[^\w.=-]+", "-", expression).strip("-.")


def check_baselines(expressions: Sequence[str], *, imports: bool = False) -> None:
    """Raise `WakefulError` for a baseline that does not exist, or two that are alike."""
    for expression in expressions:
        baseline_of(expression, imports=imports)
    if len({folder_of(expression) for expression in expressions}) < len(expressions):
        raise WakefulError(f"a baseline is named twice: {', '.join(expressions)}")
