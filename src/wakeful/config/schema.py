"""The configuration of a run: dataclasses, to and from TOML, one schema for files and flags."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w

from wakeful.config.model import ModelConfig
from wakeful.config.options import How, HowMuch, What, Where
from wakeful.config.rules import AtLeast, Excludes, RuleChecked, Within
from wakeful.config.tables import (
    TomlTable,
    flatten_table,
    from_table,
    merge_over_preset,
    merge_tables,
    read_table,
    to_table,
)
from wakeful.errors import WakefulError, did_you_mean

_MAX_TOKENS = 2**28
"""Largest number of tokens in a step, whose batch is allocated whole."""
T = TypeVar("T")
COMPARISON_KEYS = ("variants", "seeds", "layouts")
"""Keys of a table that belong to a comparison, not to a run."""
TRAINED = Excludes("vocab_size", "tokenizer", "the size is for a tokenizer that is trained")
"""Rule for options only: prepared data records the size of any tokenizer."""
_COMPARISON_FILES = ("run.json", "report.html")
"""Files in a comparison's folder beside its variants."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(RuleChecked):
    """Text and its tokenization."""

    validation_source: str = ""
    """Text to validate on. Empty: validation_fraction of the documents of the source."""
    validation_fraction: float = 0.02
    """Share of documents held out, chosen by a hash of their text."""
    keep_overlap: bool = False
    """Keep held-out documents that partly occur in the training text."""
    tokenizer: What[str] = ""
    """A tokenizer.json, a folder with one, or hf:NAME. Empty: a byte-level BPE is trained."""
    vocab_size: HowMuch[int] = 4096
    """Tokens in a tokenizer that is trained."""
    text_field: str = "text"
    """Field of JSONL and parquet rows that holds the text."""
    max_bytes: HowMuch[int] = 0
    """Largest number of bytes of text to read. 0 means all."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(TextConfig):
    """The text to train on."""

    source: What[str] = "python-stdlib"
    """python-stdlib, a file, folder or glob (text, JSONL, parquet), hf:NAME, prepared data, a
    task: backcopy(triggers=3), or mixture(parts=[("NAME", "SOURCE", WEIGHT), ...])."""
    bos: bool = False
    """Begin every window with BOS, or with the end of the text where the tokenizer has no BOS."""
    cross_documents: bool = True
    """Let attention cross document boundaries within a sequence, in training and validation."""
    max_tokens: int = 0
    """Train only on this many tokens, the first ones, repeated; validation is unchanged. 0 means
    all."""
    first_batch: int = 0
    """First batch to read in the seed's order, to continue where an earlier run's data ended."""

    SECTION = "data"
    RULES = (
        AtLeast("max_tokens", 0),
        Within("first_batch", "[0, 2**32]"),  # a row's place is a machine's number
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rate."""

    name: How[str] = "adamw"
    """adamw, orthoadam, muon, e.g. muon(ns_steps=3), or another package's: torch.optim:SGD."""
    lr: How[float] = 1e-3
    """Peak learning rate."""
    final_lr: float = 1e-4
    """Learning rate at the last step (the cosine's floor)."""
    initial_lr: float = 1e-7
    """Learning rate of the first step."""
    warmup_steps: HowMuch[int] = 20
    """Steps of linear warmup from initial_lr to lr; at most those of the run."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms, biases and scalars are not decayed."""
    clip: float = 1.0
    """Largest gradient norm. 0 means no clipping."""
    rotation: str = "hadamard"
    """OrthoAdam's rotation, such as "block_diagonal(size=32)"; other optimizers have none."""

    def __post_init__(self) -> None:
        """Raise `WakefulError` if eps is 0."""
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
    """Validation windows to diagnose, the first ones."""
    heads: bool = False
    """Also log sinks, drains and peaks of every layer and head, from before the first step on."""


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
    """Temperature of both models' logits in the KL divergence."""
    over: Literal["sum", "mean"] = "sum"
    """Reduction of KL over the vocabulary: sum, its definition, or mean (see the docs)."""


@dataclass(frozen=True, kw_only=True)
class BridgeConfig:
    """Closed-form map that replaces dropped layers (ReplaceMe, arXiv 2505.02819)."""

    map: How[Literal["none", "output", "down"]] = "down"
    """none; output: the paper's matrix on the feed-forward output; down: W_down solved again."""
    tokens: int = 65536
    """Tokens of the least-squares fit, in sequences of train.length from all of the training
    text."""
    ridge: float = 0.05
    """Ridge penalty λ on the map, relative to the mean square of its input."""


@dataclass(frozen=True, kw_only=True)
class HealConfig(RuleChecked):
    """Loss of an heir: α CE + (1 − α) T² KL(reference ‖ heir), or CE alone."""

    by: How[Literal["reference", "text", "none"]] = "reference"
    """Train on the reference's predictions (alpha adds the text), on the text alone, or not at all:
    the heir keeps the reference's layers and their bridges as they are."""
    alpha: float = 0.0
    """Share of the ordinary cross-entropy, between 0 and 1; 0 is plain KL."""
    temperature: float = 1.0
    """Temperature of both models' logits in the KL divergence."""

    SECTION = "heal"
    RULES = (
        Within("alpha", "[0, 1]"),
        Within("temperature", "(0, inf)"),
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Training loop."""

    steps: HowMuch[int] = 500
    """Optimizer steps."""
    batch_size: HowMuch[int] = 16
    """Sequences per step."""
    micro_batch_size: int = 0
    """Sequences per forward pass; their gradients accumulate over a step. 0 means batch_size."""
    length: HowMuch[int] = 256
    """Tokens per sequence. Of an heir 0 means 256, or its reference's shorter context."""
    seed: How[int] = 0
    """Seed of the initial weights and of the data order."""
    device: Where[str] = "auto"
    """auto (a GPU where there is one), cpu, cuda, cuda:1 ..."""
    dtype: How[Literal["float32", "float64", "bfloat16"]] = "float32"
    """Arithmetic of the forward pass; bfloat16 is mixed precision over float32 weights."""
    parallel: Literal["fsdp", "ddp"] = "fsdp"
    """Sharding of weights under torchrun: over all processes (fsdp) or not at all (ddp)."""
    compile: bool = False
    """Compile the model with torch.compile."""
    checkpoint_activations: bool = False
    """Recompute blocks in the backward pass: less memory, about a third more time."""
    log_every: int = 0
    """Steps between readings of the loss, each of which waits for the GPU; every step is logged.
    0: every step on a CPU, every tenth on a GPU."""
    eval_every: HowMuch[int] = 100
    """Steps between evaluations of the full validation set. 0 means only at the end; of an heir,
    every fifth of the steps."""
    eval_batch_size: int = 16
    """Sequences per forward pass in an evaluation."""
    checkpoint_every: int = 200
    """Steps between checkpoints. 0 means only at the end."""
    keep_checkpoints: int = 2
    """Checkpoints to keep, the newest ones."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs the package tensorboard)."""
    wandb: bool = False
    """Also log to Weights & Biases (needs the package wandb), project $WANDB_PROJECT or wakeful."""
    diagnose: DiagnoseConfig = field(default_factory=DiagnoseConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)


@dataclass(frozen=True, kw_only=True)
class Config(RuleChecked):
    """Configuration of a run."""

    name: Where[str] = "vanilla"
    """Name of the run in reports."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    RULES = (
        AtLeast(
            "train.steps train.batch_size train.length train.eval_batch_size "
            "train.keep_checkpoints train.diagnose.num_sequences train.quantize.num_sequences", 1,
        ),
        AtLeast(
            "train.micro_batch_size train.log_every train.eval_every train.checkpoint_every "
            "train.diagnose.every "
            "optimizer.lr optimizer.final_lr optimizer.initial_lr optimizer.eps "
            "optimizer.weight_decay optimizer.clip optimizer.warmup_steps", 0,
        ),
        Within("train.distill.alpha", "[0, 1]"),
        Within("train.distill.temperature", "(0, inf)"),
        Within("optimizer.beta1 optimizer.beta2", "[0, 1)"),
        Within("data.validation_fraction", "(0, 1)"),
        Within("train.seed", "[0, 2**63)"),
        Within("model.num_layers", "[1, 2**14]"),  # each is an object of its own
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Raise `WakefulError` if fields are out of range or contradict each other."""
        train = self.train
        for name, value in flatten_table(config_to_table(self)):
            if isinstance(value, float) and not math.isfinite(value):
                raise WakefulError(f"{name} must be finite, got {value}")
        if not self.name or "\0" in self.name:
            raise WakefulError(f"name must be fit for a folder, got {self.name!r}")
        super().__post_init__()  # checks `RULES`
        if train.length > self.model.max_length:
            raise WakefulError(
                f"train.length = {train.length} is longer than the model's context, "
                f"model.max_length = {self.model.max_length}"
            )
        if train.batch_size * train.length > _MAX_TOKENS:
            raise WakefulError(
                f"train.batch_size = {train.batch_size} sequences of train.length = "
                f"{train.length} are more than {_MAX_TOKENS} tokens a step"
            )
        if train.micro_batch_size and train.batch_size % train.micro_batch_size:
            raise WakefulError(
                f"train.micro_batch_size = {train.micro_batch_size} does not divide "
                f"train.batch_size = {train.batch_size}"
            )


def config_from_table(table: Mapping[str, Any]) -> Config:
    """Return the configuration that a table describes; missing fields have their defaults."""
    return from_table(Config, table)


def config_to_table(config: Config) -> TomlTable:
    """Return every field of a configuration as a table."""
    return to_table(config)


def config_to_toml(config: Config) -> str:
    """Return every field of a configuration as TOML."""
    return tomli_w.dumps(config_to_table(config))


def load_config(source: "Config | Mapping[str, Any] | str | Path", **changes: Any) -> Config:
    """Return the configuration that a preset's name, a TOML file or a table describes; `source` may
    also be a `Config`.

    `changes` replace its fields; a nested part is changed by a table: `train={"steps": 50}`. Seeds
    and layouts of a comparison are ignored.

    Raises:
        WakefulError: the configuration does not exist, a field is unknown or out of its range, or
            it compares variants.
    """
    table = load_config_table(source)
    if "variants" in table:
        raise WakefulError(f"{str(source)[:80]} has variants: use wakeful compare")
    table = {key: value for key, value in table.items() if key not in COMPARISON_KEYS}
    return config_from_table(merge_tables(table, changes))


def load_config_table(source: "Config | Mapping[str, Any] | str | Path") -> TomlTable:
    """Return the table of a configuration that is given as a `Config`, a preset's name, a TOML file
    or a table.

    A file or a table that names a preset is merged over it.
    """
    if isinstance(source, Config):
        return config_to_table(source)
    if isinstance(source, Mapping):
        return merge_over_preset(source, "a table")
    return read_table(source)


def split_variants(name: str, table: TomlTable) -> dict[str, TomlTable]:
    """Return the table of each variant of a comparison by the variant's name.

    Each is an entry of `variants` in `table`, merged over the table's other fields. A table without
    variants is the only one, under `name`.

    Raises:
        WakefulError: an entry is no table, or its name cannot be that of the variant's folder.
    """
    common = {key: value for key, value in table.items() if key not in COMPARISON_KEYS}
    variants = table.get("variants", {name: {}})
    if not isinstance(variants, Mapping) or not variants:
        raise WakefulError("variants must be a table with one table for each variant")
    for key, variant in variants.items():
        if not isinstance(variant, Mapping):
            raise WakefulError(f"variants.{key!r} must be a table, got {variant!r}")
        if not key or key.startswith(".") or set(key) & set("/\\\0") or key in _COMPARISON_FILES:
            raise WakefulError(
                f"variants.{key!r}: a variant's name becomes its folder's: "
                "choose one that can be a folder name"
            )
    return {
        key: merge_tables(merge_tables(common, variant), {"name": key})
        for key, variant in variants.items()
    }


def select_variants(variants: Mapping[str, T], names: Sequence[str]) -> dict[str, T]:
    """Return the variants with these names, or all if no name is given, in the order of `variants`.

    Raises:
        WakefulError: a name is unknown.
    """
    for name in names:
        if name not in variants:
            raise WakefulError(
                f"--only: no variant {name!r}{did_you_mean(name, variants)}; the variants are "
                f"{', '.join(variants)}"
            )
    return {name: variant for name, variant in variants.items() if not names or name in names}


def read_seeds(table: TomlTable) -> list[int]:
    """Return the seeds that a table names, or [0]; raise `WakefulError` if they are no list of
    whole numbers.
    """
    seeds = table.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        raise WakefulError(f"seeds must be a list of whole numbers, got {seeds!r}")
    return seeds


def read_layouts(table: TomlTable) -> list[str]:
    """Return the names of the report layouts in a table, or []; raise `WakefulError` if they are no
    list of strings.
    """
    layouts = table.get("layouts", [])
    if not isinstance(layouts, list) or any(not isinstance(name, str) for name in layouts):
        raise WakefulError(f"layouts must be a list of names, got {layouts!r}")
    return layouts
