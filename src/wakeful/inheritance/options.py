"""Options of `inherit`, under long names and short ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from wakeful.config.options import How, What, Where
from wakeful.config.reading import Bos, FigureOptions
from wakeful.config.rules import AtLeast, Excludes, Forbids, Needs, Within
from wakeful.config.schema import BridgeConfig, DataConfig, HealConfig, OptimizerConfig, TrainConfig
from wakeful.config.tables import merge_tables, nest_value, to_table
from wakeful.errors import WakefulError

Choose = Literal["angle", "first"]
Until = Literal["parity", "budget"]
RecipeName = Literal["wakeful", "inheritune"]
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "inheritune": {
        "choose": "first", "grow": 2, "until": "parity", "bridge": {"map": "none"},
        "heal": {"by": "text"}, "optimizer": {"lr": 1e-3, "final_lr": 1e-4},
    },
}  # fmt: skip
"""Papers' algorithms as options: Inheritune is algorithm 1 of When Attention Collapses."""
BaselineName = Literal["random", "reference"]


SHORT_NAMES: Mapping[str, str] = {
    "text": "data.source", "validation_text": "data.validation_source",
    "validation_fraction": "data.validation_fraction", "steps": "train.steps",
    "batch_size": "train.batch_size", "length": "train.length", "eval_every": "train.eval_every",
    "seed": "train.seed", "device": "train.device", "dtype": "train.dtype", "lr": "optimizer.lr",
}  # fmt: skip
"""Short names of an inheritance's options."""
_IMPLIED = {"batch_size": ("train.eval_batch_size", 1), "lr": ("optimizer.final_lr", 10)}
"""Second fields that a short name sets, unless given: to its value divided by a number."""


def expand_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of `InheritOptions` from one that may use short names and a recipe's name.

    The options of the recipe, and those that a short name implies, are defaults: options that the
    table itself has overrule them, and `blocks` removes the recipe's `choose`. An unknown recipe
    stays in the table, whose reader refuses it.

    Raises:
        WakefulError: a short and a long name set one field.
    """
    recipe_options = RECIPES.get(str(table.get("recipe")))
    if recipe_options is not None:
        defaults = dict(recipe_options)
        if "blocks" in table:  # the user has chosen the layers
            defaults.pop("choose", None)
        rest = {name: value for name, value in table.items() if name != "recipe"}
        # A recipe's options have long names already.
        return merge_tables(defaults, expand_table(rest)) | {"recipe": table["recipe"]}
    expanded = to_table({name: value for name, value in table.items() if name not in SHORT_NAMES})
    implied: dict[str, Any] = {}  # such as optimizer.final_lr, which lr implies
    for name, target in SHORT_NAMES.items():
        if name not in table:
            continue
        section_name, _, field_name = target.partition(".")
        section = expanded.get(section_name, {})
        if not isinstance(section, Mapping):
            continue  # the reader of the table refuses it: a section must be a table
        if field_name in section:
            raise WakefulError(f"{target} and {name} both set {target}: give one")
        value = table[name]
        expanded = merge_tables(expanded, nest_value(target, value))
        if name in _IMPLIED and isinstance(value, int | float):
            implied_field, divisor = _IMPLIED[name]
            implied_value = value / divisor if divisor > 1 else value  # a whole number stays whole
            implied = merge_tables(implied, nest_value(implied_field, implied_value))
    return merge_tables(implied, expanded)


@dataclass(frozen=True, kw_only=True)
class InheritOptions(FigureOptions):
    """Layers to inherit, their training, and starts to compare with.

    By default length is 256 or the reference's context, and eval_every a fifth of the steps.

    Long names work too: --steps is --train.steps, --text is --data.source, and --lr is
    --optimizer.lr with a tenth of it as --optimizer.final_lr.
    """

    out: Where[str] = ""
    """Folder to create. Empty: runs/inherit-REFERENCE."""
    resume: Where[str] = ""
    """Continue the inheritance in this folder; it takes no other option but figures."""
    layers: What[int] = 0
    """Layers of the heir. 0: as many as keep says, or half of the reference's."""
    keep: What[float] = 0.0
    """Share of the reference's layers to keep, instead of layers."""
    choose: How[Choose] = "angle"
    """Rule for the layers: all but the neighbors over which the stream turns least (angle), or the
    first, as the paper has them."""
    blocks: tuple[int, ...] = ()
    """The layers themselves, counted from 0, instead of layers, keep and choose."""
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    heal: HealConfig = field(default_factory=HealConfig)
    bos: Bos = "auto"
    """BOS before every window that heirs and reference read: as the reference's own tokenizer does
    (auto), on, or off."""
    route: What[str] = ""
    """Value route to switch on, e.g. resformer(mode="learnable"). Empty: the reference's."""
    normalizer: What[str] = ""
    """Normalizer to switch on, e.g. softmax1. Empty: the reference's."""
    grow: How[int] = 0
    """Layers that each round adds, 2 in the paper; the last may add fewer. 0: one round."""
    until: Until = "parity"
    """Grow until the reference's loss is reached, or through all rounds."""
    rounds: int = 0
    """Maximum rounds. 0: until the heir is as deep as the reference."""
    baseline: What[tuple[BaselineName, ...]] = ()
    """Models to train beside the heir for as many steps on the text: its shape from random weights,
    or the whole reference."""
    recipe: How[RecipeName] = "wakeful"
    """Defaults: our own, or a paper's. inheritune copies the first layers, trains on the text, and
    adds two layers of the reference per round until its loss is reached. Other options overrule
    these."""
    data: DataConfig = field(default_factory=lambda: DataConfig(validation_fraction=0.005))
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=3e-4, final_lr=3e-5, warmup_steps=0)
    )
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            steps=500, length=0, batch_size=4, eval_batch_size=4, eval_every=0, checkpoint_every=0,
            keep_checkpoints=1,
        )
    )  # fmt: skip

    short_names: ClassVar[Mapping[str, str]] = SHORT_NAMES
    expand = staticmethod(expand_table)
    RULES = (
        AtLeast("layers grow rounds train.length train.eval_every train.checkpoint_every "
                "bridge.ridge", 0),
        AtLeast("train.steps bridge.tokens", 1),
        Within("keep", "[0, 1]"),
        Excludes("layers", "keep blocks", "both say which layers"),
        Excludes("keep", "blocks", "both say which layers"),
        Excludes("blocks", "choose", "the layers are named, and nothing is left to choose"),
        Excludes("bridge.map=none", "bridge.tokens bridge.ridge",
                 "there is no bridge"),
        Needs("rounds until", "grow", "it is for growing"),
        Excludes("heal.by=none", "train.steps optimizer.lr optimizer.name baseline grow",
                 "nothing is trained"),
        Excludes("heal.by", "heal.alpha heal.temperature",
                 "the reference's predictions are not learned from"),
        Excludes("bos=off", "data.bos", "they contradict each other"),
        Forbids("data.first_batch", why="it follows from what an heir was trained for before"),
        Forbids("data.tokenizer data.vocab_size", why="an heir has its reference's tokenizer"),
        Forbids("data.keep_overlap", why="what an heir remembers of its validation text would "
                "count as what it has learned"),
        Forbids("train.distill.teacher", why="an inheritance's teacher is its reference"),
        Forbids("train.distill.alpha train.distill.temperature train.distill.over",
                why="an heir learns as --heal says"),
    )  # fmt: skip
