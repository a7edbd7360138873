"""What each verb may be told: one dataclass a verb, for flags, Python and files alike.

Nothing here imports torch, so that `--help` is quick.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from wakeful.config.options import How, HowMuch, Seldom, What, Where
from wakeful.config.schema import (
    BridgeConfig,
    DataConfig,
    HealConfig,
    OptimizerConfig,
    SampleConfig,
    TextConfig,
    TrainConfig,
    WidthConfig,
)
from wakeful.config.tables import at_least, from_table, merged, nested, to_table
from wakeful.errors import WakefulError, nearest

Bos = Literal["auto", "on", "off"]
Dtype = Literal["float32", "float64", "bfloat16"]
Figure = Literal["svg", "png", "pdf"]
ScaleKind = Literal["dynamic", "static"]
Arithmetic = Literal["reference", "integer", "torchao"]
SavedAs = Literal["wakeful", "compressed-tensors"]
Choose = Literal["first", "middle", "last", "alternate", "stacked",
                 "rank", "mass", "influence", "angle", "bridge", "lazy"]  # fmt: skip
Copy = Literal["all", "attention", "mlp", "without_norms", "blocks", "embeddings"]
"""What is inherited: everything; of the blocks the attention or the feed-forward network, each with
the norm before it, or both without their norms (table 2); the blocks alone, without embeddings,
positions, final norm and head, as the paper's code does; or those alone. The rest starts at
random."""
Until = Literal["parity", "budget"]
GrowFrom = Literal["reference", "student"]

SOURCES = (
    "a run directory, a Transformers folder, a GGUF file, smollm2, a hub name or a quantized model"
)
"""What a model is named by."""
LENGTH = 512
"""Tokens a sequence where neither the user nor the model's context says otherwise."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """A model and the text it reads."""

    text: What[str] = ""
    """Text to read: a file, folder or glob, or a task: backcopy(triggers=3). Empty: see data."""
    data: What[str] = ""
    """Text by name instead, such as hf:NAME. Empty: a run's own task, or python-stdlib."""
    length: HowMuch[int] = 0
    """Tokens a sequence. 0: 512, or the model's context where that is shorter."""
    bos: Bos = "auto"
    """BOS before every sequence: as the model's own tokenizer does (auto), on, or off."""
    out: Where[str] = ""
    """Folder to create. Empty: runs/VERB-MODEL."""
    device: Where[str] = "auto"
    """auto, cpu, cuda ..."""
    dtype: Dtype = "float32"
    """Arithmetic of the full-precision model; what is measured is float32 or better."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Leave it out for models you do not trust."""

    def __post_init__(self) -> None:
        if self.text and self.data:
            raise WakefulError(
                f"text = {self.text!r} and data = {self.data!r} both name the text: give one"
            )
        if self.length < 0 or self.length == 1:
            raise WakefulError(f"length = {self.length}: a sequence needs at least 2 tokens")

    @property
    def source(self) -> str:
        """The text to read."""
        return self.text or self.data or DataConfig.source

    def length_for(self, context: int) -> int:
        """Return the tokens a sequence for a model with this context."""
        return self.length or min(LENGTH, context)


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions(_Reading):
    """What to measure, on what."""

    num_sequences: HowMuch[int] = 4
    """Sequences, one after another from the text's beginning."""
    tau: How[float] = 0.9
    """Share of a head's energy that its rank holds."""
    lazy_rank: How[float] = 2.0
    """A layer is lazy when no head's rank is above this."""
    rank_tokens: int = 2048
    """Longest sequence whose ranks are settled exactly; past it they may be bounds."""
    rank_seconds: HowMuch[float] = 600.0
    """Time for exact ranks; past it they may be bounds."""
    layers: How[tuple[int, ...]] = ()
    """Layers whose attention is pictured. Empty: four, spread over the depth."""
    heads: How[tuple[int, ...]] = ()
    """Heads whose attention is pictured. Empty: the first four."""
    figures: Where[tuple[Figure, ...]] = ()
    """Write the charts for a paper too, in these formats, into the folder figures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "num_sequences")
        if not 0 < self.tau <= 1:
            raise WakefulError(f"tau = {self.tau} is a share, above 0 and at most 1")


def with_shots(task: str) -> tuple[str, int | None]:
    """Return the name and the shots of TASK or TASK@SHOTS; None where it leaves them open.

    Raises:
        WakefulError: what stands behind the @ is not a number of examples.
    """
    name, at, shots = task.partition("@")
    if at and not shots.isdecimal():
        raise WakefulError(
            f"task {task!r}: behind the @ goes the number of solved examples, e.g. {name}@5"
        )
    return name, int(shots) if at else None


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(_Reading):
    """What to measure, on what; with examples and no text, the examples alone."""

    texts: What[tuple[str, ...]] = ()
    """Several texts in place of one, each with figures of its own: files, folders, globs."""
    speed: What[tuple[int, ...]] = ()
    """Lengths of a prompt at which reading and writing are timed, e.g. 128 1024 4096; the model's
    size comes along."""
    stride: HowMuch[int] = 0
    """Tokens from one window to the next. 0: the length, so that windows do not overlap."""
    num_sequences: HowMuch[int] = 0
    """Windows at most, from the text's beginning. 0: all of a text that is named, else 64."""
    lambada: What[str] = ""
    """JSON lines {"text": ...}: predict the last word."""
    choices: What[str] = ""
    """JSON lines {"question" or "context", "choices", "answer"}, or PIQA's {"goal", "sol1",
    "sol2"}: choose the answer."""
    labels: str = ""
    """The answers to choices, one number a line from 0, where they are in a file of their own."""
    tasks: What[tuple[str, ...]] = ()
    """Tasks of lm-eval by name, as TASK@SHOTS with that many solved examples before each question;
    their data comes from the Hugging Face hub."""
    shots: int = 0
    """Solved examples before each question of tasks that are named without."""
    limit: HowMuch[int] = 0
    """Examples at most of each task. 0: all."""
    batch_size: HowMuch[int] = 4
    """Windows or examples a forward pass."""
    figures: Where[tuple[Figure, ...]] = ()
    """Write the charts for a paper too, in these formats, into the folder figures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "batch_size")
        at_least(0, self, "stride", "num_sequences", "limit", "shots")
        if self.texts and (self.text or self.data):
            raise WakefulError("texts stand in place of text and data: name all among texts")
        stems = [Path(text).stem for text in self.texts]
        for stem in stems:
            if stems.count(stem) > 1:
                raise WakefulError(f"two of the texts are called {stem}: figures go by that name")
        if any(length < 1 for length in self.speed) or len({*self.speed}) < len(self.speed):
            raise WakefulError(f"speed = {self.speed}: lengths of at least 1, each once")
        for name in ("length", "stride", "num_sequences"):
            if not self.sources and getattr(self, name):
                raise WakefulError(f"{name} is for a text, and none is given; add --text or --data")
        if self.length and self.stride > self.length:
            raise WakefulError(
                f"stride = {self.stride} must be between 1 and the length, {self.length}"
            )
        if self.labels and not self.choices:
            raise WakefulError("labels are for --choices, and none are given")
        named = [with_shots(task)[0] for task in self.tasks]
        if len(set(named)) < len(named):
            raise WakefulError(f"tasks = {self.tasks}: each once, with one number of shots")
        if self.shots and not self.tasks:
            raise WakefulError("shots are for tasks, which bring solved examples; add --tasks")
        if self.limit and not self.asks:
            raise WakefulError("limit is for examples; a text is shortened by --num_sequences")

    @property
    def source(self) -> str:
        """The one text to measure perplexity on; empty where something else is asked for."""
        other = self.asks or self.texts or self.speed
        return self.text or self.data or ("" if other else DataConfig.source)

    @property
    def sources(self) -> dict[str, str]:
        """The texts to measure perplexity on, by the names of their figures."""
        several = {Path(text).stem: text for text in self.texts}
        return {"text": self.source} if self.source else several

    @property
    def windows(self) -> int:
        """Windows at most; 0: all."""
        return self.num_sequences or (0 if self.text or self.data or self.texts else 64)

    @property
    def asks(self) -> bool:
        """Whether lm-eval is needed."""
        return bool(self.lambada or self.choices or self.tasks)


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(_Reading):
    """How to quantize, and what text to measure the damage on."""

    scheme: How[tuple[str, ...]] = ()
    """fine, moderate, coarse, w4, w4g128, w4g128_gptq, w4a16, w8a8, smoothquant, fp8, mxfp4, nvfp4,
    kv8, kv4, or e.g. scheme(weights=absmax(bits=6, per="channel")). None: the first four, or the
    layout's."""
    layout: How[str] = ""
    """Set the models beside a published table of pretrained ones: activation-table1."""
    scales: How[tuple[ScaleKind, ...]] = ("dynamic",)
    """Activation scales: of the text at hand, or calibrated once; both measure each that can be."""
    num_sequences: HowMuch[int] = 8
    """Sequences to measure on, one after another from the text's beginning."""
    calibration_sequences: HowMuch[int] = 4
    """Sequences for static scales, gptq and smoothquant, the next ones of the text."""
    save: Where[str] = ""
    """Folder to create with the quantized model, to load and generate from. Takes one scheme."""
    save_as: Where[SavedAs] = "wakeful"
    """What --save writes: our own format, or compressed-tensors, which stock Transformers and vLLM
    load."""
    arithmetic: Arithmetic = "integer"
    """Dequantized numbers, int8 products, or torchao's kernels; the same to rounding."""
    skip: What[tuple[str, ...]] = ()
    """Layers to leave in full precision, by name or pattern: lm_head, *.down_proj."""
    figures: Where[tuple[Figure, ...]] = ()
    """Write the charts for a paper too, in these formats, into the folder figures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "num_sequences", "calibration_sequences")
        if not self.scales:
            raise WakefulError("name at least one kind of scales")
        if self.save_as != "wakeful" and not self.save:
            raise WakefulError(f"save_as = {self.save_as!r} says what --save writes: name a folder")
        if self.layout and self.save:
            raise WakefulError(
                "--save writes one model, and --layout measures a table: name one of them"
            )


@dataclass(frozen=True, kw_only=True)
class CureOptions(_Reading):
    """What to do to a model, and what text to verify it on."""

    rotate: How[str] = ""
    """Rotate the residual stream: hadamard, haar, block_diagonal(size=64). Empty: leave it."""
    rotate_inner: How[bool] = False
    """Rotate what the feed-forward networks' last projections read too, as the model runs."""
    prefix: How[str] = ""
    """Store a prefix: bos, or a number of tokens to choose (1, 2 ...). Empty: none."""
    sinks: How[bool] = False
    """Put a learned sink into every head, fitted to the model's own statistics."""
    gates: How[bool] = False
    """Put a gate on every head's output, fitted likewise; beside sinks it needs --steps."""
    steps: HowMuch[int] = 0
    """Steps to train a model with sinks or gates. 0: none, they stay as they were fitted."""
    batch_size: HowMuch[int] = 4
    """Sequences a training step."""
    train_length: HowMuch[int] = 256
    """Tokens of a training sequence, or the model's context where that is shorter."""
    lr: How[float] = 1e-4
    """Peak learning rate of the training of sinks and gates."""
    seed: int = 0
    """Seed of the rotation and of the order of training."""
    num_sequences: HowMuch[int] = 2
    """Sequences to verify on, one after another from the text's beginning."""
    figures: Where[tuple[Figure, ...]] = ()
    """Write the charts for a paper too, in these formats, into the folder figures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "num_sequences")
        if not (self.rotate or self.rotate_inner or self.prefix or self.trains):
            raise WakefulError(
                "name a cure: --rotate hadamard, --rotate_inner, --prefix bos, --sinks, --gates"
            )
        if self.prefix and self.trains:
            raise WakefulError(
                f"prefix = {self.prefix!r} keeps the token that sinks and gates do without: choose "
                "one of them"
            )
        if self.trains and self.dtype == "bfloat16":
            raise WakefulError("dtype = bfloat16 is too coarse to train sinks and gates: float32")
        if self.gates and self.rotate:
            raise WakefulError(
                f"rotate = {self.rotate!r} does not turn the gates' own matrices: rotate without "
                "--gates, or use --sinks"
            )
        if self.sinks and self.gates and not self.steps:
            raise WakefulError(
                "steps = 0 leaves gates beside sinks that do nothing: train them, or choose one"
            )
        at_least(1, self, "batch_size")
        at_least(2, self, "train_length")
        at_least(0, self, "steps")
        if not 0 < self.lr < math.inf:
            raise WakefulError(f"lr = {self.lr}: must be positive")
        if self.prefix not in ("", "bos") and not (self.prefix.isdecimal() and int(self.prefix)):
            raise WakefulError(
                f"prefix = {self.prefix!r}: must be bos, or a number of tokens to choose"
            )

    @property
    def trains(self) -> bool:
        """Whether sinks or gates are put in, which are trained."""
        return self.sinks or self.gates


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How to continue a prompt."""

    num_tokens: HowMuch[int] = 100
    """Most tokens to add."""
    temperature: How[float] = 0.8
    """Divides the logits; 0 takes the likeliest token every time."""
    top_k: How[int] = 50
    """Sample from this many of the likeliest tokens; 0 means all."""
    top_p: How[float] = 1.0
    """Choose among the likeliest tokens that together reach this probability."""
    seed: How[int] = 0
    """Seed of the choice."""
    bos: Bos = "auto"
    """BOS before the prompt: as the model's own tokenizer does (auto), on, or off."""
    step: What[int] = 0
    """Checkpoint of a run to use, by its step. 0 means the newest."""
    device: Where[str] = "auto"
    """auto, cpu, cuda ..."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to write a model for Transformers."""

    dtype: How[Literal["float32", "bfloat16", "float16"]] = "float32"
    """Type of the weights written to a folder."""
    gguf: How[Literal["f32", "f16", "q8_0", "q4_0"]] = "f16"
    """What a file NAME.gguf stores matrices as."""
    step: What[int] = 0
    """Checkpoint of the run to write, by its step. 0 means the newest."""
    layers: What[tuple[str, ...]] = ()
    """Layers to keep, from 0, e.g. 0-2 18-29. Of any architecture of Transformers, experts too."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the report goes."""

    out: Where[str] = ""
    """HTML file to write. Empty: report.html in the first folder; for exhibits, claims.html."""
    title: Where[str] = ""
    """Heading of the page."""
    figures: Where[tuple[Figure, ...]] = ()
    """Write the charts for a paper too, in these formats, into the folder figures."""


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """At which scale, and where; without an exhibit's name, all are listed."""

    scale: HowMuch[Literal["tiny", "small", "paper"]] = "tiny"
    """Minutes on two cores, an hour or so, or the paper's own models and tokens."""
    all: What[bool] = False
    """Run every exhibit that can be run."""
    out: Where[str] = ""
    """Folder of the exhibit. Empty: runs/reproduce/SCALE/PAPER-EXHIBIT. The same one goes on."""
    runs: str = ""
    """Folder of the training runs, which exhibits share. Empty: runs, beside the exhibit's."""
    seeds: HowMuch[tuple[int, ...]] = ()
    """Seeds of every row. Empty: the scale's."""
    steps: HowMuch[int] = 0
    """Steps of the baseline instead of the scale's; rows that train longer do so in proportion."""
    text: What[str] = ""
    """Text instead of the scale's: a file, folder, glob, prepared data or hf:NAME."""
    validation_text: str = ""
    """Text to validate on. Empty: a part of the text."""
    tokenizer: str = ""
    """Tokenizer instead of the scale's, or "train" for one of the text. Empty: the scale's."""
    models: What[tuple[str, ...]] = ()
    """Pretrained models instead of the scale's: of an exhibit that looks at some, one for each of
    its rows; of one that makes heirs of one, that one. Empty: the scale's."""
    tasks: What[bool] = False
    """Ask the models the paper's tasks at this scale too, whose data the hub has; else the
    validation loss is judged in their place."""
    device: Where[str] = ""
    """auto, cpu, cuda ... Empty: the scale's."""
    dtype: str = ""
    """float32, bfloat16 ... Empty: the scale's."""
    cluster: Where[str] = ""
    """Deal rows and seeds out: "local(workers=2)", "slurm(workers=8, partition='a')" ..."""
    figures: Where[tuple[Figure, ...]] = ()
    """Write the charts for a paper too, in these formats, into the folder figures."""

    def __post_init__(self) -> None:
        at_least(0, self, "steps")
        if self.validation_text and not self.text:
            raise WakefulError("--validation_text is for a text of one's own: give --text too")
        if self.all and self.out:
            raise WakefulError("--out is one exhibit's folder: leave it out with --all")


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(TextConfig):
    """How to turn text into memory-mapped tokens.

    wakeful data generate --help: text that a model writes.
    """

    out: Where[str]
    """Folder to create."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Text for a model to generate as training data.

    The same command goes on with what was cut off.
    """

    out: Where[str]
    """Folder to create."""
    tokens: HowMuch[int] = 1_000_000
    """Tokens to write at least; the last document is whole."""
    length: HowMuch[int] = 0
    """Most tokens of a document. 0: 512, or the model's context where that is shorter."""
    batch_size: HowMuch[int] = 16
    """Documents written side by side."""
    temperature: How[float] = 1.0
    """Divides the logits."""
    top_k: How[int] = 0
    """Sample from this many of the likeliest tokens; 0 means all."""
    top_p: How[float] = 1.0
    """Choose among the likeliest tokens that together reach this probability."""
    seed: How[int] = 0
    """Seed of the choice, and of what is held out."""
    prompts: What[str] = ""
    """File with a prompt a line, each for a document in turn. Empty: none."""
    chat: How[Bos] = "auto"
    """Begin with the chat template: a prompt is what a user says; without prompts the model writes
    question and answer. auto: of a model that has one."""
    validation_fraction: float = TextConfig.validation_fraction
    """Share of documents held out, chosen by a hash of their tokens."""
    step: What[int] = 0
    """Checkpoint of a run to use, by its step. 0 means the newest."""
    device: Where[str] = "auto"
    """auto, cpu, cuda ..."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Leave it out for models you do not trust."""

    def __post_init__(self) -> None:
        at_least(1, self, "tokens", "batch_size")
        at_least(0, self, "top_k", "length", "seed")
        if not 0 < self.temperature < math.inf:
            raise WakefulError(
                f"temperature = {self.temperature}: must be positive, or every document is the same"
            )
        if not 0 < self.top_p <= 1:
            raise WakefulError(f"top_p = {self.top_p}: must be in (0, 1]")
        if not 0 < self.validation_fraction < 1:
            raise WakefulError(
                f"validation_fraction = {self.validation_fraction}: must lie between 0 and 1"
            )

    def length_for(self, context: int) -> int:
        """Return the most tokens of a document, for a model with this context."""
        return self.length or min(LENGTH, context)


@dataclass(frozen=True, kw_only=True)
class InheritOptions:
    """What to inherit, how to train it, and what to compare it with.

    Unless told otherwise, steps are as many as minutes allow, length is 256 or the reference's
    context, and eval_every is a fifth of the steps.

    Long names work too: --steps is --train.steps, --text and --data are --data.source, and --lr is
    --optimizer.lr with a tenth of it as --optimizer.final_lr.
    """

    out: Where[str] = ""
    """Folder to create. Empty: runs/inherit-REFERENCE."""
    resume: Where[str] = ""
    """Continue the inheritance in this folder; it takes no other option but figures."""
    layers: What[int] = 0
    """Layers of the heir. 0: as many as keep says, half of the reference's, or all with width."""
    keep: What[float] = 0.0
    """Share of the reference's layers to keep, instead of layers."""
    choose: How[Choose] = "angle"
    """Which layers: all but the neighbors over which the stream turns least (angle), or without
    which, bridged, the loss is least (bridge); those with the highest rank, mass or influence; or
    a range: first is the paper's."""
    gaps: int = 1
    """Runs of neighbors that angle may leave out."""
    blocks: tuple[int, ...] = ()
    """The layers themselves, counted from 0, instead of layers, keep and choose."""
    pinned: int = 1
    """First layers that stay whatever a diagnosis says of them."""
    copy: Copy = "all"
    """What is inherited; the rest starts at random. The paper's code copies blocks alone."""
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    heal: HealConfig = field(default_factory=HealConfig)
    width: WidthConfig = field(default_factory=WidthConfig)
    bos: Bos = "auto"
    """BOS before every window that heirs and reference read: as the reference's own tokenizer does
    (auto), on, or off."""
    drops: int = 1
    """Drop the layers in this many parts, healing after each for its share of the steps."""
    route: What[str] = ""
    """Value route to switch on, e.g. resformer(mode="learnable"). Empty: the reference's."""
    normalizer: What[str] = ""
    """Normalizer to switch on, e.g. softmax1. Empty: the reference's."""
    grow: How[int] = 0
    """Layers that each round adds, 2 in the paper; the last takes what is left. 0: one round."""
    until: Until = "parity"
    """Grow until the reference's loss is reached, or through all rounds."""
    rounds: HowMuch[int] = 0
    """Most rounds. 0: until the heir is as deep as the reference."""
    grow_from: GrowFrom = "reference"
    """A round begins from the reference's blocks, or keeps the student's and adds to them."""
    baseline: What[tuple[str, ...]] = ()
    """Other starts to train alike, by name: random, stacking, half_width ..."""
    seeds: HowMuch[tuple[int, ...]] = ()
    """Train everything with each of these seeds, for errors over seeds. Empty: with seed alone."""
    cluster: Where[str] = ""
    """Deal the seeds out: "local(workers=2)", "slurm(workers=8, partition='a')" ..."""
    figures: Where[tuple[Figure, ...]] = ()
    """Write the charts for a paper too, in these formats, into the folder figures."""
    recipe: bool = False
    """Write mergekit.yaml too: a passthrough recipe of the last heir's layers."""
    minutes: HowMuch[float] = 0.0
    """Time for everything; with steps, no new round begins after it. 0 without steps: 30."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises, unless optimizer.warmup_steps says."""
    diagnose_length: int = 0
    """Tokens a sequence of the diagnosis that layers are chosen by. 0: 512, or the context."""
    diagnose_sequences: int = 4
    """Sequences of that diagnosis, from the training text's beginning."""
    data: Annotated[DataConfig, Seldom(("tokenizer", "vocab_size"))] = field(
        default_factory=lambda: DataConfig(validation_fraction=0.005)
    )
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=3e-4, final_lr=3e-5, warmup_steps=0)
    )
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            steps=0, length=0, batch_size=4, eval_batch_size=4, eval_every=0, checkpoint_every=0,
            keep_checkpoints=1,
        )
    )  # fmt: skip
    sample: SampleConfig = field(
        default_factory=lambda: SampleConfig(prompts=("def ",), num_tokens=32)
    )

    def __post_init__(self) -> None:
        depth = [name for name in ("layers", "keep", "blocks") if getattr(self, name)]
        if len(depth) > 1:
            raise WakefulError(f"--{depth[0]} and --{depth[1]} both say which layers: give one")
        if self.data.first_batch:
            raise WakefulError(
                "data.first_batch follows from what an heir was trained for before: leave it out"
            )
        if self.bos == "off" and self.data.bos:
            raise WakefulError("bos = off and data.bos contradict each other: leave out one")
        if self.blocks and self.choose != InheritOptions.choose:
            raise WakefulError(f"--blocks names the layers, so --choose {self.choose} does nothing")
        if not 0 <= self.keep <= 1:
            raise WakefulError(f"keep = {self.keep} is a share of the layers, between 0 and 1")
        at_least(
            0, self, "layers", "grow", "rounds", "minutes", "pinned", "train.steps",
            "train.length", "train.eval_every", "train.checkpoint_every", "bridge.ridge",
        )  # fmt: skip
        self._check_heir()
        if not 0 <= self.warmup <= 1:
            raise WakefulError(f"warmup = {self.warmup} is a share of the steps, between 0 and 1")
        if not self.grow and (self.rounds > 1 or self.until != "parity"
                              or self.grow_from != "reference"):  # fmt: skip
            raise WakefulError(
                "--rounds, --until and --grow_from are for growing: give --grow too, such as 2"
            )
        if self.diagnose_length < 0 or self.diagnose_length == 1 or self.diagnose_sequences < 1:
            raise WakefulError(
                "diagnose_length must be 0 or at least 2 and diagnose_sequences at least 1, got "
                f"{self.diagnose_length} and {self.diagnose_sequences}"
            )
        if self.data.tokenizer or self.data.vocab_size != DataConfig.vocab_size:
            raise WakefulError(
                "data.tokenizer and data.vocab_size: an heir has its reference's tokenizer; leave "
                "them out"
            )
        if self.data.keep_overlap:
            raise WakefulError(
                "data.keep_overlap: what an heir remembers of its validation text would count as "
                "what it has learned; leave it out"
            )
        if self.train.distill.teacher:
            raise WakefulError(
                f"train.distill.teacher = {self.train.distill.teacher!r}: an inheritance's teacher "
                "is its reference, for the baselines that learn from one"
            )

        if self.train.lora.rank:
            raise WakefulError(
                f"train.lora.rank = {self.train.lora.rank}: adapters are for what begins as good "
                "as healed, which no baseline does; give --heal.lora.rank"
            )

    def _check_heir(self) -> None:
        at_least(1, self, "gaps", "bridge.tokens")
        if self.gaps > 1 and (self.blocks or self.choose != "angle"):
            raise WakefulError("--gaps is for --choose angle, which decides what is left out")
        if self.choose == "bridge" and self.bridge.map == "none":
            raise WakefulError("--choose bridge tries runs of layers with a bridge: --bridge.map")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds, default=0) < 0:
            raise WakefulError(f"seeds = {list(self.seeds)}: each is a whole number, named once")
        if self.seeds and self.train.seed:
            raise WakefulError("--seed and --seeds both name the seed: give one")
        at_least(0, self, "heal.top_k", "heal.hidden", "heal.lora.rank")
        at_least(1, self, "drops")
        for name in ("top_k", "by"):
            value = getattr(self.heal, name)
            if self.heal.hidden and value != getattr(HealConfig, name):
                raise WakefulError(
                    f"--heal.hidden {self.heal.hidden:g} needs the reference's streams in every "
                    f"step, which --heal.{name} {value} does without: leave out one"
                )
        if self.width and (self.grow or self.drops > 1 or self.copy != "all"):
            raise WakefulError(
                "--width narrows every layer once, from the whole reference: leave out --grow, "
                "--drops and --copy"
            )
        if self.drops > 1 and (self.grow or self.blocks or self.copy != "all"):
            raise WakefulError(
                f"--drops {self.drops} heals between drops of whole layers in the order that "
                "--choose gives: leave out --grow, --blocks and --copy"
            )
        if self.heal.lora.rank and self.copy != "all":
            raise WakefulError(
                f"--copy {self.copy} starts parts of every block at random, which adapters "
                "(--heal.lora.rank) cannot train: give one of the two"
            )
        if not self.heal.top_k and (self.heal.store or self.heal.rest != HealConfig.rest):
            raise WakefulError(
                "--heal.store and --heal.rest are for stored predictions: give --heal.top_k too"
            )
        if self.heal.top_k and self.heal.by == "text":
            raise WakefulError(
                f"--heal.top_k {self.heal.top_k} is of the reference's predictions, which "
                "--heal.by text does not learn from: give one of the two"
            )
        if self.copy != "all" and self.bridge.map != "none":
            raise WakefulError(
                f"--copy {self.copy} starts parts of every block at random, and a bridge is solved "
                "on what the blocks compute: give --bridge.map none too"
            )


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Nothing: a verb that takes arguments alone."""


SHORT = {
    "text": ("data.source",),
    "text_field": ("data.text_field",),
    "max_bytes": ("data.max_bytes",),
    "validation_text": ("data.validation_source",),
    "validation_fraction": ("data.validation_fraction",),
    "steps": ("train.steps",),
    "batch_size": ("train.batch_size", "train.eval_batch_size"),
    "micro_batch_size": ("train.micro_batch_size",),
    "length": ("train.length",),
    "eval_every": ("train.eval_every",),
    "checkpoint_every": ("train.checkpoint_every",),
    "seed": ("train.seed",),
    "device": ("train.device",),
    "dtype": ("train.dtype",),
    "alpha": ("train.distill.alpha",),
    "temperature": ("train.distill.temperature",),
    "lr": ("optimizer.lr", "optimizer.final_lr"),
    "weight_decay": ("optimizer.weight_decay",),
    "prompts": ("sample.prompts",),
    "data": ("data.source",),
    "optimizer": ("optimizer.name",),
}
"""Short names of an inheritance's options, which its older files have too."""


def short_value(field_name: str, name: str, value: Any) -> Any:
    """Return what a short name's value means for one of the fields it stands for."""
    return float(value) / 10 if (name, field_name) == ("lr", "optimizer.final_lr") else value


def inherit_table(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of `InheritOptions` from one that may use short names.

    Raises:
        WakefulError: two names say one thing.
    """
    long: dict[str, Any] = {}
    said: dict[str, str] = {}
    implied: dict[str, Any] = {}
    for name, value in given.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            long = merged(long, {name: to_table(value)})
        elif isinstance(value, Mapping) or name not in SHORT:
            long = merged(long, {name: value})
        else:
            target, *others = SHORT[name]
            other = said.setdefault(target, target if _in(given, target) else name)
            if other != name:
                raise WakefulError(f"{other} and {name} both set {target}: give one")
            long = merged(long, nested(target, value))
            for other in others:
                implied = merged(implied, nested(other, short_value(other, name, value)))
    return merged(implied, long)


def _in(given: Mapping[str, Any], target: str) -> bool:
    found: Any = given
    for part in target.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return False
        found = found[part]
    return True


def inherit_options(given: Mapping[str, Any]) -> InheritOptions:
    """Return the options that a table with long or short names describes."""
    return from_table(InheritOptions, merged(to_table(InheritOptions()), inherit_table(given)))


def options_from(kind: type[T], given: Mapping[str, Any]) -> T:
    """Return a verb's options from keyword arguments.

    A list serves for a tuple, and a single value for a tuple of one.

    Raises:
        WakefulError: there is no such option, or its value is of another type.
    """
    names = {entry.name for entry in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    names |= set(SHORT) if kind is InheritOptions else set()
    for name in given:
        if name not in names:
            raise WakefulError(
                f"there is no option {name!r}{nearest(name, names)}; there are "
                f"{', '.join(sorted(names))}"
            )
    if kind is InheritOptions:
        plain = {name: _plain(kind, name, value) for name, value in given.items()}
        return inherit_options(plain)  # pyright: ignore[reportReturnType]
    return from_table(kind, {name: _plain(kind, name, value) for name, value in given.items()})


def _plain(kind: type, name: str, value: Any) -> Any:
    default = getattr(kind, name, None)
    if isinstance(default, tuple) and not isinstance(value, list | tuple | range):
        return [value]
    if hasattr(value, "__fspath__"):
        return str(value)
    return list(value) if isinstance(value, range) else value
