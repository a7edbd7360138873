"""The configuration of a run: dataclasses, to and from TOML, one schema for files and flags."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w

from wakeful.config.model import ModelConfig
from wakeful.config.options import How, HowMuch, What, Where
from wakeful.config.refusals import AtLeast, AtMost, Excludes, Ruled, Within
from wakeful.config.tables import (
    Table,
    flattened,
    from_table,
    merged,
    on_preset,
    read_table,
    to_table,
)
from wakeful.errors import WakefulError, nearest

_MOST_TOKENS = 2**28
"""Of a step: a batch is made at once."""
T = TypeVar("T")
OWN_KEYS = ("variants", "seeds", "layouts")
"""Keys of a table that are of a comparison and not of a run."""
TRAINED = Excludes("vocab_size", "tokenizer", "the size is for a tokenizer that is trained")
"""Of what is asked for: data that is prepared keeps its size beside a tokenizer that is its own."""
_OWN_FILES = ("run.json", "report.html")
"""Files in a comparison's folder beside its variants."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(Ruled):
    """How text becomes tokens."""

    validation_source: str = ""
    """Text to validate on. Empty: validation_fraction of the documents of the source."""
    validation_fraction: float = 0.02
    """Share of documents held out, chosen by a hash of their text."""
    keep_overlap: bool = False
    """Validate even on documents that partly occur in the training text."""
    tokenizer: What[str] = ""
    """A tokenizer.json, a folder with one, or hf:NAME. Empty: a byte-level BPE is trained."""
    vocab_size: HowMuch[int] = 4096
    """Tokens in a tokenizer that is trained."""
    text_field: str = "text"
    """Field of JSONL and parquet rows that holds the text."""
    max_bytes: HowMuch[int] = 0
    """Read no more text than this, in bytes. 0 means all."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(TextConfig):
    """The text to train on."""

    source: What[str] = "python-stdlib"
    """python-stdlib, a file, folder or glob (text, JSONL, parquet), hf:NAME, prepared data, a
    task: backcopy(triggers=3), or mixture(parts=[("NAME", "SOURCE", WEIGHT), ...])."""
    bos: bool = False
    """Begin every window with BOS, or with the end of the text where the tokenizer has no BOS."""
    cross_documents: bool = True
    """Let attention cross from a document into the next of its sequence, in training and losses."""
    max_tokens: int = 0
    """Train on this many first tokens alone, repeated; validation is unchanged. 0 means all."""
    first_batch: int = 0
    """First batch to read in the seed's order, to go on where an earlier run's data ended."""

    SECTION = "data"
    RULES = (
        AtLeast("max_tokens", 0),
        Within("first_batch", "[0, 2**32]"),  # a row's place is a machine's number
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How weights follow gradients."""

    name: How[str] = "adamw"
    """adamw, orthoadam, muon, such as muon(ns_steps=3), or another package's: torch.optim:SGD."""
    lr: How[float] = 1e-3
    """Peak learning rate."""
    final_lr: float = 1e-4
    """Learning rate at the last step (the cosine's floor)."""
    initial_lr: float = 1e-7
    """Learning rate of the first step."""
    warmup_steps: HowMuch[int] = 20
    """Steps from initial_lr to lr, in a straight line; at most all of the run's."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms, biases and scalars have none."""
    clip: float = 1.0
    """Largest gradient norm. 0 means no clipping."""
    rotation: str = "hadamard"
    """OrthoAdam's rotation, such as "block_diagonal(size=32)"; other optimizers have none."""

    def __post_init__(self) -> None:
        if self.eps == 0:
            raise WakefulError(
                "optimizer.eps must be above 0, got 0: without it a gradient that stays zero gives "
                "0 / 0"
            )


@dataclass(frozen=True, kw_only=True)
class DiagnoseConfig:
    """Figures of docs/metrics.md, measured on the validation text and logged while training."""

    every: int = 0
    """Steps between diagnoses. 0 means none."""
    num_sequences: int = 4
    """Validation windows to look at, the first ones."""
    heads: bool = False
    """Log sinks, drains and peaks of every layer and head too, from before the first step on."""
    attention: int = 0
    """Log every head's weights among this many first tokens of the first window too. 0: none."""

    @property
    def from_the_start(self) -> bool:
        """Whether heads are looked at before the first step too."""
        return bool(self.every and (self.heads or self.attention))


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Schemes of docs/quantization.md, measured on the validation text when training ends."""

    schemes: tuple[str, ...] = ()
    """fine, moderate, coarse, w4 or an expression. Empty: none."""
    num_sequences: int = 32
    """Validation windows to measure on, the first ones."""


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Learning from a teacher's predictions: alpha · CE + (1 − alpha) · temperature² · KL."""

    teacher: str = ""
    """Model to learn from: a run, a Transformers folder, GGUF, smollm2. Empty: no teacher."""
    alpha: float = 0.6
    """Share of the ordinary cross-entropy, between 0 and 1."""
    temperature: float = 1.0
    """Divides both models' logits in the divergence KL."""
    over: Literal["sum", "mean"] = "sum"
    """KL summed over the vocabulary, which it is by definition, or averaged (see the docs)."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: each matrix of a block is frozen and learns a difference B A."""

    rank: int = 0
    """Rank of every difference. 0: no adapters, all weights learn."""
    alpha: float = 32.0
    """The difference is scaled by alpha / rank."""
    modules: Literal["all", "attention", "mlp"] = "all"
    """Linear layers that get an adapter: all, the attention's, or the feed-forward network's."""


@dataclass(frozen=True, kw_only=True)
class BridgeConfig:
    """The closed-form map that stands for layers left out (ReplaceMe, arXiv 2505.02819)."""

    map: How[Literal["none", "output", "down"]] = "down"
    """none; output: the paper's matrix on the feed-forward output; down: W_down solved again."""
    tokens: int = 65536
    """Tokens that it is solved on, in sequences of train.length all over the training text."""
    ridge: float = 0.05
    """λ of the penalty on the map, over the mean square of what it reads."""
    weigh: Literal["relative", "equal"] = "relative"
    """Each token's squared error over its squared length, or as it is."""
    first: Literal["apart", "out", "in"] = "apart"
    """The first token of a sequence: left out, but held to the reference's direction where it would
    be turned; left out; or counted as any other."""


@dataclass(frozen=True, kw_only=True)
class HealConfig(Ruled):
    """The loss of an heir: α CE + (1 − α) T² KL(reference ‖ heir), or CE alone."""

    by: How[Literal["reference", "text", "none"]] = "reference"
    """Learn from the reference's predictions (alpha adds the text), from the text alone, or not at
    all: the heir is what its layers and their bridges make it."""
    alpha: float = 0.0
    """Share of the ordinary cross-entropy, between 0 and 1; 0 is plain KL."""
    temperature: float = 1.0
    """Divides both models' logits in the divergence KL."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    SECTION = "heal"
    RULES = (
        Within("alpha", "[0, 1]"),
        Within("temperature", "(0, inf)"),
        AtLeast("lora.rank", 0),
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop."""

    steps: HowMuch[int] = 500
    """Optimizer steps."""
    batch_size: HowMuch[int] = 16
    """Sequences per step."""
    micro_batch_size: int = 0
    """Sequences at once; the rest of a step accumulates. 0 means batch_size."""
    length: HowMuch[int] = 256
    """Tokens per sequence."""
    seed: How[int] = 0
    """Seed of the initial weights and of the data order."""
    device: Where[str] = "auto"
    """auto (a GPU where there is one), cpu, cuda, cuda:1 ..."""
    dtype: How[Literal["float32", "bfloat16", "float64"]] = "float32"
    """Arithmetic of the forward pass; bfloat16 is mixed precision over float32 weights."""
    parallel: Literal["fsdp", "hsdp", "ddp"] = "fsdp"
    """Under torchrun, shard weights over all processes (fsdp), a machine's (hsdp) or none (ddp)."""
    compile: bool = False
    """Compile the model with torch.compile."""
    checkpoint_activations: bool = False
    """Recompute blocks in the backward pass: less memory, about a third more time."""
    log_every: int = 0
    """Steps between readings of the loss, which wait for a GPU; each step has its row all the same.
    0: every step on a CPU, every tenth elsewhere."""
    eval_every: HowMuch[int] = 100
    """Steps between evaluations of the full validation set. 0 means only at the end."""
    eval_batch_size: int = 16
    """Sequences at once in an evaluation."""
    checkpoint_every: int = 200
    """Steps between checkpoints. 0 means only at the end."""
    keep_checkpoints: int = 2
    """Checkpoints kept, the newest."""
    tensorboard: bool = False
    """Write TensorBoard events too (needs the package tensorboard)."""
    wandb: bool = False
    """Log to Weights & Biases too (needs the package wandb), project $WANDB_PROJECT or wakeful."""
    trackio: bool = False
    """Log to trackio too (needs the package trackio), project $TRACKIO_PROJECT or wakeful."""
    diagnose: DiagnoseConfig = field(default_factory=DiagnoseConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The continuations written at the end of a run."""

    prompts: tuple[str, ...] = ()
    """Beginnings to continue. Empty: those of three windows of the validation text."""
    num_tokens: int = 64
    """Tokens to add to each."""
    temperature: float = 0.8
    """0 takes the likeliest token."""
    top_k: int = 50
    """Sample from this many of the likeliest tokens; 0 means all."""
    seed: int = 0
    """Seed of the choice."""


@dataclass(frozen=True, kw_only=True)
class Config(Ruled):
    """One run."""

    name: Where[str] = "vanilla"
    """Name of the run in reports."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    RULES = (
        AtLeast(
            "train.steps train.batch_size train.length train.eval_batch_size "
            "train.keep_checkpoints train.diagnose.num_sequences train.quantize.num_sequences", 1,
        ),
        AtLeast(
            "train.micro_batch_size train.log_every train.eval_every train.checkpoint_every "
            "train.diagnose.every train.diagnose.attention "
            "train.lora.rank optimizer.lr optimizer.final_lr "
            "optimizer.initial_lr optimizer.eps optimizer.weight_decay optimizer.clip "
            "optimizer.warmup_steps sample.num_tokens sample.temperature sample.top_k", 0,
        ),
        Within("train.distill.alpha", "[0, 1]"),
        Within("train.distill.temperature", "(0, inf)"),
        Within("optimizer.beta1 optimizer.beta2", "[0, 1)"),
        Within("data.validation_fraction", "(0, 1)"),
        Within("train.seed sample.seed", "[0, 2**63)"),
        Within("model.num_layers", "[1, 2**14]"),  # each is an object of its own
        Excludes("model.relaxed_prefix", "data.cross_documents=False", "it needs whole sequences"),
        AtMost("train.length", "model.max_length", "the model's context"),
        AtMost("model.relaxed_prefix train.diagnose.attention", "train.length"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        train = self.train
        for name, value in flattened(config_to_table(self)):
            if isinstance(value, float) and not math.isfinite(value):
                raise WakefulError(f"{name} must be finite, got {value}")
        if not self.name or "\0" in self.name:
            raise WakefulError(f"name must be fit for a folder, got {self.name!r}")
        super().__post_init__()
        if train.batch_size * train.length > _MOST_TOKENS:
            raise WakefulError(
                f"train.batch_size = {train.batch_size} sequences of train.length = "
                f"{train.length} are more than {_MOST_TOKENS} tokens a step"
            )
        if train.micro_batch_size and train.batch_size % train.micro_batch_size:
            raise WakefulError(
                f"train.micro_batch_size = {train.micro_batch_size} does not divide "
                f"train.batch_size = {train.batch_size}"
            )
        asked, least = train.diagnose.attention, max(2, self.model.relaxed_prefix)
        if 0 < asked < least:
            raise WakefulError(
                f"train.diagnose.attention must be 0 or at least {least}, got {asked}"
            )


def config_from_table(table: Mapping[str, Any]) -> Config:
    """Return the configuration a table describes; what it leaves out has its default."""
    return from_table(Config, table)


def config_to_table(config: Config) -> Table:
    """Return every field of a configuration as a table."""
    return to_table(config)


def config_to_toml(config: Config) -> str:
    """Return every field of a configuration as TOML."""
    return tomli_w.dumps(config_to_table(config))


def config_from(source: "Config | Mapping[str, Any] | str | Path", **changes: Any) -> Config:
    """Return the configuration that a preset's name, a TOML file or a table describes.

    `changes` are fields in place of its own, tables for its parts: `train={"steps": 50}`.

    Raises:
        WakefulError: there is none, a field is unknown or out of its range, or it is a comparison.
    """
    table = table_of(source)
    if "variants" in table:
        raise WakefulError(f"{str(source)[:80]} has variants: use wakeful compare")
    table = {key: value for key, value in table.items() if key not in OWN_KEYS}
    return config_from_table(merged(table, changes))


def table_of(source: "Config | Mapping[str, Any] | str | Path") -> Table:
    """Return the table of a configuration, a preset's name, a TOML file or another table."""
    if isinstance(source, Config):
        return config_to_table(source)
    return on_preset(source, "a table") if isinstance(source, Mapping) else read_table(source)


def variants_of(name: str, table: Table) -> dict[str, Table]:
    """Return the configurations in a table: itself, or one for each entry of `[variants]`."""
    rest = {key: value for key, value in table.items() if key not in OWN_KEYS}
    entries = table.get("variants", {name: {}})
    if not isinstance(entries, Mapping) or not entries:
        raise WakefulError("variants must be a table with one table for each variant")
    for key, entry in entries.items():
        if not isinstance(entry, Mapping):
            raise WakefulError(f"variants.{key!r} must be a table, got {entry!r}")
        if not key or key.startswith(".") or set(key) & set("/\\\0") or key in _OWN_FILES:
            raise WakefulError(
                f"variants.{key!r}: a variant's name becomes its folder's: "
                "choose one that can be a folder name"
            )
    return {key: merged(merged(rest, entry), {"name": key}) for key, entry in entries.items()}


def chosen_variants(variants: Mapping[str, T], names: Sequence[str]) -> dict[str, T]:
    """Return the variants with these names, or all where none is named, in their own order.

    Raises:
        WakefulError: a name is unknown.
    """
    for name in names:
        if name not in variants:
            raise WakefulError(
                f"--only: no variant {name!r}{nearest(name, variants)}; the variants are "
                f"{', '.join(variants)}"
            )
    return {name: each for name, each in variants.items() if not names or name in names}


def seeds_of(table: Table) -> list[int]:
    """Return the seeds a table asks for, one if it says nothing."""
    seeds = table.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        raise WakefulError(f"seeds must be a list of whole numbers, got {seeds!r}")
    return seeds


def layouts_of(table: Table) -> list[str]:
    """Return the names of the layouts that a table asks the report to be laid out as too."""
    layouts = table.get("layouts", [])
    if not isinstance(layouts, list) or any(not isinstance(name, str) for name in layouts):
        raise WakefulError(f"layouts must be a list of names, got {layouts!r}")
    return layouts
