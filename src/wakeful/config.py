"""The configuration of a run: dataclasses, to and from TOML, one schema for files and flags."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w

from wakeful.errors import WakefulError
from wakeful.model.architecture import ModelConfig
from wakeful.toml_text import parse_toml
from wakeful.variants import nearest

Table = dict[str, Any]
_MOST_TOKENS = 2**28
"""Of a step: a batch is made at once."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What text to train on."""

    source: str = "python-stdlib"
    """python-stdlib, a file, folder or glob (text, JSONL, parquet), hf:NAME, or prepared data."""
    validation_source: str = ""
    """Text to validate on. Empty: validation_fraction of the documents of source."""
    validation_fraction: float = 0.02
    """Share of documents held out, chosen by a hash of their text."""
    keep_overlap: bool = False
    """Validate even on documents that stand in the training text in part."""
    tokenizer: str = ""
    """A tokenizer.json or a folder with one. Empty: a byte-level BPE is trained on the text."""
    vocab_size: int = 4096
    """Tokens in a tokenizer that is trained."""
    text_field: str = "text"
    """Field of JSONL and parquet rows that holds the text."""
    max_bytes: int = 0
    """Read no more text than this, in bytes. 0 means all."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How weights follow gradients."""

    name: str = "adamw"
    """adamw, orthoadam, rmsprop, sgd, sgd_momentum or muon."""
    lr: float = 1e-3
    """Peak learning rate."""
    final_lr: float = 1e-4
    """Learning rate at the last step (the cosine's floor)."""
    initial_lr: float = 1e-7
    """Learning rate of the first step."""
    warmup_steps: int = 20
    """Steps from initial_lr to lr, in a straight line."""
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
    """OrthoAdam's rotation; other optimizers have none."""


@dataclass(frozen=True, kw_only=True)
class DiagnoseConfig:
    """Figures of docs/metrics.md, measured on the validation text and logged while training."""

    every: int = 0
    """Steps between diagnoses. 0 means none."""
    num_sequences: int = 4
    """Validation windows to look at, the first ones."""


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Schemes of docs/quantisation.md, measured on the validation text when training ends."""

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
class TrainConfig:
    """The loop."""

    steps: int = 500
    """Optimizer steps."""
    batch_size: int = 16
    """Sequences a step."""
    micro_batch_size: int = 0
    """Sequences at once; the rest of a step accumulates. 0 means batch_size."""
    length: int = 256
    """Tokens a sequence."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, cuda:1 ..."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Arithmetic of the forward pass; bfloat16 is mixed precision over float32 weights."""
    parallel: Literal["fsdp", "hsdp", "ddp"] = "fsdp"
    """Under torchrun: weights shared out over all processes, over each machine's, or over none."""
    compile: bool = False
    """Compile the model with torch.compile."""
    checkpoint_activations: bool = False
    """Recompute blocks in the backward pass: less memory, about a third more time."""
    eval_every: int = 100
    """Steps between evaluations of the full validation set. 0 means only at the end."""
    eval_batch_size: int = 16
    """Sequences at once in an evaluation."""
    checkpoint_every: int = 200
    """Steps between checkpoints. 0 means only at the end."""
    keep_checkpoints: int = 2
    """Checkpoints kept, the newest."""
    tensorboard: bool = False
    """Write TensorBoard events too (needs the package tensorboard)."""
    diagnose: DiagnoseConfig = field(default_factory=DiagnoseConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The continuations written at the end of a run."""

    prompts: tuple[str, ...] = ("def ", "class ", "import ")
    """Beginnings to continue."""
    num_tokens: int = 64
    """Tokens to add to each."""
    temperature: float = 0.8
    """0 takes the likeliest token."""
    top_k: int = 50
    """Choose among so many likeliest tokens. 0 means all."""
    seed: int = 0
    """Seed of the choice."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run."""

    name: str = "vanilla"
    """What reports call the run."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    def __post_init__(self) -> None:
        train, model, optimizer = self.train, self.model, self.optimizer
        _check_values(self)
        for name in ("steps", "batch_size", "length", "eval_batch_size", "keep_checkpoints"):
            if getattr(train, name) < 1:
                raise WakefulError(f"train.{name} must be at least 1, got {getattr(train, name)}")
        for name in ("micro_batch_size", "eval_every", "checkpoint_every"):
            if getattr(train, name) < 0:
                raise WakefulError(f"train.{name} must not be negative, got {getattr(train, name)}")
        if train.length > model.max_length:
            raise WakefulError(
                f"train.length = {train.length} is longer than the model's context, "
                f"model.max_length = {model.max_length}"
            )
        if train.micro_batch_size and train.batch_size % train.micro_batch_size:
            raise WakefulError(
                f"train.micro_batch_size = {train.micro_batch_size} does not divide "
                f"train.batch_size = {train.batch_size}"
            )
        if optimizer.warmup_steps > train.steps:
            raise WakefulError(
                f"optimizer.warmup_steps = {optimizer.warmup_steps} is more than train.steps = "
                f"{train.steps}"
            )
        for name in ("lr", "final_lr", "initial_lr", "eps", "weight_decay", "clip", "warmup_steps"):
            if not getattr(optimizer, name) >= 0:
                raise WakefulError(
                    f"optimizer.{name} must not be negative, got {getattr(optimizer, name)}"
                )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(optimizer, name) < 1:
                raise WakefulError(
                    f"optimizer.{name} must be in [0, 1), got {getattr(optimizer, name)}"
                )
        if not 0 < self.data.validation_fraction < 1:
            raise WakefulError(
                "data.validation_fraction must be between 0 and 1, "
                f"got {self.data.validation_fraction}"
            )


def presets() -> list[str]:
    """Return the names of the configurations that come with wakeful."""
    folder = resources.files("wakeful") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())


def read_table(source: str | Path) -> Table:
    """Return the table of a TOML file, or of a preset by its name.

    A table may start from a preset: `preset = "value-residual-82m"` at its top.

    Raises:
        WakefulError: there is no such file or preset, or it is not TOML.
    """
    path = Path(source)
    if _is_file(path):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise WakefulError(f"{path} cannot be read: {error.strerror or error}") from None
        table = parse_toml(content, str(path))
    elif str(source) in presets():
        text = (resources.files("wakeful") / "presets" / f"{source}.toml").read_bytes()
        table = parse_toml(text, f"preset {source}")
    else:
        raise WakefulError(
            f"no configuration {str(source)[:200]!r}: it is neither a file nor a preset"
            f"{nearest(str(source), presets())}; presets are {', '.join(presets())}"
        )
    if "preset" in table:
        base = table.pop("preset")
        if base not in presets():
            raise WakefulError(f"{source}: unknown preset {base!r}{nearest(str(base), presets())}")
        return merged(read_table(base), table)
    return table


def config_from_table(table: Mapping[str, Any]) -> Config:
    """Return the configuration a table describes; what it leaves out has its default."""
    return _read(Config, table, "")


def config_to_table(config: Config) -> Table:
    """Return every field of a configuration as a table."""
    return to_table(config)


def to_table(value: object) -> Table:
    """Return every field of a dataclass, and of those in it, as a table."""
    return typing.cast(Table, _plain(value))


def from_table(kind: type, table: Mapping[str, Any]) -> Any:
    """Return the dataclass of this kind that a table describes; see `config_from_table`."""
    return _read(kind, table, "")


def config_to_toml(config: Config) -> str:
    """Return every field of a configuration as TOML."""
    return tomli_w.dumps(config_to_table(config))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """Return `base` with the entries of `over` in place of its own, tables merged in turn."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result


def _check_values(config: Config) -> None:
    for section, table in config_to_table(config).items():
        for name, value in table.items() if isinstance(table, dict) else ():
            if isinstance(value, float) and not math.isfinite(value):
                raise WakefulError(f"{section}.{name} must be finite, got {value}")
            if name == "seed" and not 0 <= value < 2**63:
                raise WakefulError(f"{section}.seed must be in [0, 2**63), got {value}")
    for name in ("num_tokens", "temperature", "top_k"):
        if getattr(config.sample, name) < 0:
            raise WakefulError(
                f"sample.{name} must not be negative, got {getattr(config.sample, name)}"
            )
    if config.train.batch_size * config.train.length > _MOST_TOKENS:
        raise WakefulError(
            f"train.batch_size = {config.train.batch_size} sequences of train.length = "
            f"{config.train.length} are more than {_MOST_TOKENS} tokens a step"
        )
    if config.model.relaxed_prefix > config.train.length:
        raise WakefulError(
            f"model.relaxed_prefix = {config.model.relaxed_prefix} is longer than train.length = "
            f"{config.train.length}"
        )
    diagnose = config.train.diagnose
    if diagnose.every < 0 or diagnose.num_sequences < 1:
        raise WakefulError(
            "train.diagnose.every must not be negative and train.diagnose.num_sequences at least "
            f"1, got {diagnose.every} and {diagnose.num_sequences}"
        )
    if config.train.quantize.num_sequences < 1:
        raise WakefulError(
            "train.quantize.num_sequences must be at least 1, got "
            f"{config.train.quantize.num_sequences}"
        )
    distill = config.train.distill
    if not 0 <= distill.alpha <= 1 or not 0 < distill.temperature < math.inf:
        raise WakefulError(
            "train.distill.alpha must be between 0 and 1 and train.distill.temperature positive, "
            f"got {distill.alpha} and {distill.temperature}"
        )
    if not config.name or "\0" in config.name:
        raise WakefulError(f"name must be fit for a folder, got {config.name!r}")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long for a name
        return False


def _read(kind: type, table: object, place: str) -> Any:
    if not isinstance(table, Mapping):
        raise WakefulError(f"{place} must be a table, got {table!r}")
    hints = typing.get_type_hints(kind)
    fields = {entry.name for entry in dataclasses.fields(kind)}
    values: Table = {}
    for key, value in table.items():
        where = f"{place}.{key}" if place else str(key)
        if key not in fields:
            raise WakefulError(
                f"unknown key {where!r}{nearest(str(key), fields)}; "
                f"{place or 'the top level'} has {', '.join(sorted(fields))}"
            )
        expected = hints[key]
        if dataclasses.is_dataclass(expected) and isinstance(expected, type):
            values[key] = _read(expected, value, where)
        else:
            values[key] = _typed(expected, value, where)
    for entry in dataclasses.fields(kind):
        required = entry.default is dataclasses.MISSING is entry.default_factory
        if required and entry.name not in values:
            raise WakefulError(f"{place or 'the top level'} has no {entry.name}")
    return kind(**values)


def _typed(expected: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is Literal:
        if value not in arguments:
            allowed = ", ".join(map(str, arguments))
            raise WakefulError(f"{where} must be one of {allowed}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise WakefulError(f"{where} must be a list, got {value!r}")
        return tuple(_typed(arguments[0], item, f"{where}[{n}]") for n, item in enumerate(value))
    if origin in (typing.Union, types.UnionType):
        raise TypeError(f"{where}: the schema uses no unions")
    if expected is float and type(value) is int and abs(value) < 2**1000:  # as floats are
        return float(value)
    if type(value) is not expected:
        raise WakefulError(f"{where} must be {_words(expected)}, got {value!r}")
    return value


def _words(kind: type) -> str:
    return {
        int: "a whole number", float: "a number", str: "a string", bool: "true or false"
    }[kind]  # fmt: skip


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)
        }
    return list(value) if isinstance(value, tuple) else value
