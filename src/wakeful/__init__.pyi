"""The public functions with their options as keyword arguments.

python tools/signatures.py writes this file from the dataclasses of options.
"""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, overload

from wakeful.config.schema import BridgeConfig, DataConfig, HealConfig, OptimizerConfig, TrainConfig
from wakeful.curing.options import CureOptions
from wakeful.diagnosis.options import DiagnoseOptions
from wakeful.evaluation.options import EvaluateOptions
from wakeful.exporting.options import ExportOptions
from wakeful.generation.options import GenerateOptions
from wakeful.inheritance.options import InheritOptions
from wakeful.quantization.options import QuantizeOptions
from wakeful.terminal.display import DisplayFactory
from wakeful.errors import WakefulError as WakefulError
from wakeful.loading.load import load as load
from wakeful.loading.model import AnyTokenizer
from wakeful.probes.watch import watch as watch
from wakeful.quantization.schemes import Scheme
from wakeful.training.comparison import compare as compare
from wakeful.curing.tool import Cure
from wakeful.diagnosis.tool import Diagnosis
from wakeful.evaluation.tool import Evaluation
from wakeful.inheritance.result import Inheritance
from wakeful.quantization.result import Quantization, QuantizationMatrix
from wakeful.reporting.tool import report as report
from wakeful.loading.sources import Source
from wakeful.training.tool import train as train
from wakeful.version import __version__ as __version__

__all__: Sequence[str]
Tokenizer = AnyTokenizer | str | PathLike[str] | None

def diagnose(
    *models: Source,
    tokenizer: Tokenizer = None,
    display: DisplayFactory | None = None,
    options: DiagnoseOptions | None = None,
    figures: Iterable[Literal["svg", "png", "pdf"]] | Literal["svg", "png", "pdf"] = (),
    text: str | PathLike[str] = "",
    length: int = 0,
    bos: Literal["auto", "on", "off"] = "auto",
    out: str | PathLike[str] = "",
    device: str = "auto",
    dtype: Literal["float32", "float64", "bfloat16"] = "float32",
    trust_remote_code: bool = False,
    num_sequences: int = 4,
    no_advice: bool = False,
) -> Diagnosis:
    """Measure where models waste attention and channels, by the metrics of docs/metrics.md.

        wakeful.diagnose("smollm2", text="book.txt", length=256)

    Args:
        models: names, paths, what `wakeful.load` returned, or modules in memory.
        tokenizer: replaces a model's own; required for a module; may be a path.
        display: shows progress; None is a bar where there is a terminal.
        figures: Also write the charts for a paper, in these formats, into the folder figures.
        text: Text to read: a file, folder or glob, hf:NAME, or a task: backcopy(triggers=3).
            Empty: a run's own task, or python-stdlib.
        length: Tokens per sequence. 0: 512, or the model's context where that is shorter.
        bos: BOS before every sequence: as the model's own tokenizer does (auto), on, or off.
        out: Folder to create. Empty: runs/VERB-MODEL, numbered where that exists.
        device: auto, cpu, cuda ...
        dtype: Arithmetic of the full-precision model; what is measured is float32 or better.
        trust_remote_code: Run code that comes with the model. Leave it out for models you do
            not trust.
        num_sequences: Sequences, one after another from the text's beginning.
        no_advice: Do not try cures on 8 windows of the text; the diagnosis then recommends
            none.

    With `out` the run directory is written too, which must not exist; without it nothing is.

    Raises:
        WakefulError: a model or the text cannot be read, the text is shorter than one sequence, an
            option is out of its range, or `out` exists. Nothing is written.
    """

def cure(
    model: Source,
    *,
    tokenizer: Tokenizer = None,
    display: DisplayFactory | None = None,
    options: CureOptions | None = None,
    figures: Iterable[Literal["svg", "png", "pdf"]] | Literal["svg", "png", "pdf"] = (),
    text: str | PathLike[str] = "",
    length: int = 0,
    bos: Literal["auto", "on", "off"] = "auto",
    out: str | PathLike[str] = "",
    device: str = "auto",
    dtype: Literal["float32", "float64", "bfloat16"] = "float32",
    trust_remote_code: bool = False,
    for_: Iterable[str] | str = (),
    stock: bool = False,
    rotate: str = "",
    rotate_values: bool = False,
    rotate_inner: bool = False,
    rotate_keys: bool = False,
    prefix: Literal["", "auto", "bos"] = "",
    sinks: bool = False,
    seed: int = 0,
    num_sequences: int = 2,
    stored: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
) -> Cure:
    """Remove a model's activation outliers and attention sinks, without training.

        cured = wakeful.cure("smollm2", rotate="hadamard", prefix="bos").model

    The model itself stays as it is.

    Args:
        model: a name, a path, what `wakeful.load` returned, or a module in memory.
        tokenizer: replaces the model's own; required for a module; may be a path.
        display: shows progress; None is a bar where there is a terminal.
        figures: Also write the charts for a paper, in these formats, into the folder figures.
        text: Text to read: a file, folder or glob, hf:NAME, or a task: backcopy(triggers=3).
            Empty: a run's own task, or python-stdlib.
        length: Tokens per sequence. 0: 512, or the model's context where that is shorter.
        bos: BOS before every sequence: as the model's own tokenizer does (auto), on, or off.
        out: Folder to create. Empty: runs/VERB-MODEL, numbered where that exists.
        device: auto, cpu, cuda ...
        dtype: Arithmetic of the full-precision model; what is measured is float32 or better.
        trust_remote_code: Run code that comes with the model. Leave it out for models you do
            not trust.
        for_: Choose the cure for number formats by measuring: nvfp4, mxfp4, int8, w4a8, w4a4,
            w4a16, kv4, or any scheme of quantize.
        stock: Choose among cures that leave one of Transformers' own architectures, which
            engines and quantize --save want.
        rotate: Rotate the residual stream: hadamard, haar, block_diagonal(size=64). It helps 8
            bits and int4 inputs, and hurts NVFP4: see --for. Empty: leave it.
        rotate_values: Rotate every head's values alone, by Hadamard: exact wherever a model's
            norms stand.
        rotate_inner: Rotate the inputs of the feed-forward networks' last projections too, as
            the model runs.
        rotate_keys: Rotate queries and keys after RoPE, as the model runs, for a cache of 4
            bits.
        prefix: Store a token before every text: auto, BOS if it takes the sink without raising
            the loss on the text, else another token that does, if any; or bos in any case.
            Empty: none.
        sinks: Put a learned sink into every head, fitted to the model's own statistics.
        seed: Seed of the rotation.
        num_sequences: Sequences to verify on, one after another from the text's beginning.
        stored: Type of the weights written, which the cured ones are rounded to. auto: as the
            model's files have it.

    With `out` the cured model is written to a folder that Transformers loads, which must not exist.

    Raises:
        WakefulError: the model cannot be converted to our decoder, or a cure cannot be exact (the
            part that forbids it is named); nothing is written.
    """

def evaluate(
    *models: Source,
    tokenizer: Tokenizer = None,
    display: DisplayFactory | None = None,
    options: EvaluateOptions | None = None,
    figures: Iterable[Literal["svg", "png", "pdf"]] | Literal["svg", "png", "pdf"] = (),
    text: str | PathLike[str] = "",
    length: int = 0,
    bos: Literal["auto", "on", "off"] = "auto",
    out: str | PathLike[str] = "",
    device: str = "auto",
    dtype: Literal["float32", "float64", "bfloat16"] = "float32",
    trust_remote_code: bool = False,
    texts: Iterable[str | PathLike[str]] | str | PathLike[str] = (),
    speed: Iterable[int] | int = (),
    stride: int = 0,
    num_sequences: int = 0,
    lambada: str = "",
    choices: str = "",
    tasks: Iterable[str] | str = (),
    limit: int = 0,
    batch_size: int = 4,
) -> Evaluation:
    """Measure how well models predict, and what they cost: perplexity of texts, LAMBADA, multiple
    choice, tasks of lm-eval, size and speed.

        wakeful.evaluate("smollm2", "heir", text="book.txt", num_sequences=64)
        wakeful.evaluate("smollm2", "heir", texts=["a.txt", "b.txt"], speed=[128, 1024])

    Args:
        models: names, paths, what `wakeful.load` returned, or modules in memory.
        tokenizer: of a module in memory.
        display: shows progress; None is a bar where there is a terminal.
        figures: Also write the charts for a paper, in these formats, into the folder figures.
        text: Text to read: a file, folder or glob, hf:NAME, or a task: backcopy(triggers=3).
            Empty: a run's own task, or python-stdlib.
        length: Tokens per sequence. 0: 512, or the model's context where that is shorter.
        bos: BOS before every sequence: as the model's own tokenizer does (auto), on, or off.
        out: Folder to create. Empty: runs/VERB-MODEL, numbered where that exists.
        device: auto, cpu, cuda ...
        dtype: Arithmetic of the full-precision model; what is measured is float32 or better.
        trust_remote_code: Run code that comes with the model. Leave it out for models you do
            not trust.
        texts: Several texts in place of one, each with figures of its own: files, folders,
            globs.
        speed: Lengths of a prompt at which reading and writing are timed, e.g. 128 1024 4096;
            the model's size is reported too.
        stride: Tokens from one window to the next. 0: the length, so that windows do not
            overlap.
        num_sequences: Windows at most, from the text's beginning. 0: all of a text that is
            named, else 64.
        lambada: JSON lines {"text": ...}: predict the last word.
        choices: JSON lines {"question" or "context", "choices", "answer"}, or PIQA's {"goal",
            "sol1", "sol2", "label"}: choose the answer.
        tasks: Tasks of lm-eval by name, as TASK@SHOTS with that many examples before each
            question; their data comes from the Hugging Face hub.
        limit: Examples at most of each task. 0: all.
        batch_size: Windows or examples per forward pass.

    With `out` the run directory is written too, which must not exist; without it nothing is.

    Raises:
        WakefulError: a model, a text or a file of examples cannot be read, lm-eval is missing or
            does not know a task, an option is out of its range, or `out` exists. Nothing is
            written.
    """

@overload
def quantize(
    model: Source,
    *schemes: str | Scheme,
    tokenizer: Tokenizer = None,
    display: DisplayFactory | None = None,
    options: QuantizeOptions | None = None,
    figures: Iterable[Literal["svg", "png", "pdf"]] | Literal["svg", "png", "pdf"] = (),
    text: str | PathLike[str] = "",
    length: int = 0,
    bos: Literal["auto", "on", "off"] = "auto",
    out: str | PathLike[str] = "",
    device: str = "auto",
    dtype: Literal["float32", "float64", "bfloat16"] = "float32",
    trust_remote_code: bool = False,
    scheme: Iterable[str] | str = (),
    num_sequences: int = 8,
    calibration_sequences: int = 16,
    calibration_text: Iterable[str | PathLike[str]] | str | PathLike[str] = (),
    save: str | PathLike[str] = "",
    skip: Iterable[str] | str = (),
    sensitivity: bool = False,
    for_: Literal["vllm", "llama.cpp"] = "vllm",
    bits: float = 0.0,
    bytes: int = 0,
    loss: float = 0.0,
    rotation: str = "",
    against: Iterable[str] | str = (),
    cache: Literal["", "fp8", "int8", "fp8_head", "int8_head"] = "",
    tune: int = 0,
    tuning_state: str | PathLike[str] = "",
) -> Quantization:
    """Quantize models' linear layers and caches, and measure the damage on a text.

        small = wakeful.quantize("smollm2", "coarse").model
        wakeful.quantize("smollm2", "fine", "w4", text="book.txt")
        wakeful.quantize(["smollm2", "cured"], "coarse", "w4g128_gptq", "nvfp4", text="book.txt")

    The models themselves stay unchanged. A single model is measured only with `text`, `out`,
    `sensitivity`, or a budget of `bits`, `bytes` or `loss`.

    Args:
        model: a name, a path, what `wakeful.load` returned, or a module in memory; or a list of
            several, which are measured one after another.
        schemes: names or expressions, as in `QuantizeOptions.scheme`, or `Scheme` objects.
        tokenizer: the tokenizer of a module in memory.
        display: shows progress; None shows a bar in a terminal.
        figures: Also write the charts for a paper, in these formats, into the folder figures.
        text: Text to read: a file, folder or glob, hf:NAME, or a task: backcopy(triggers=3).
            Empty: a run's own task, or python-stdlib.
        length: Tokens per sequence. 0: 512, or the model's context where that is shorter.
        bos: BOS before every sequence: as the model's own tokenizer does (auto), on, or off.
        out: Folder to create. Empty: runs/VERB-MODEL, numbered where that exists.
        device: auto, cpu, cuda ...
        dtype: Arithmetic of the full-precision model; what is measured is float32 or better.
        trust_remote_code: Run code that comes with the model. Leave it out for models you do
            not trust.
        scheme: A scheme's name (listed below) or expression: scheme(weights=absmax(bits=6,
            per="channel")). None: fine, moderate, coarse, w4. With --bits, --bytes or --loss:
            formats to choose from instead of the engine's.
        num_sequences: Sequences to measure on, one after another from the text's beginning.
        calibration_sequences: Calibration sequences for static scales, methods and caches that
            need them.
        calibration_text: Texts to calibrate on, named as for --text, with equally many
            sequences from each. None: the sequences that follow the measured ones.
        save: Folder to create with the quantized model in the format compressed-tensors, which
            Transformers and vLLM load. Needs a single scheme that the format supports.
        skip: Layers to leave in full precision, by name or pattern: lm_head, *.down_proj.
        sensitivity: Rank layers by the loss increase when each alone is quantized. Needs a
            single scheme.
        for_: Engine whose formats --bits, --bytes and --loss choose from. llama.cpp: Q4_0,
            Q5_0, Q8_0 and F16, also for embeddings and head; --save NAME.gguf writes the file,
            NAME.txt the flags of llama-quantize.
        bits: Choose a format for each layer, with at most this many bits per weight on average,
            scales included, embeddings and head not. 0: every layer has the same scheme.
        bytes: Choose a format for each layer, with at most this many bytes for the whole file.
        loss: Choose a format for each layer, with the fewest bytes that raise the loss by at
            most this many nats per token.
        rotation: With --bits, --bytes or --loss: rotate the model before its formats are
            chosen. auto: try values, hadamard and blocks as wide as the format's groups on
            calibration text, and use the best if its 95% interval shows that it helps and the
            file does not grow. Or name one: values, hadamard, block_diagonal(size=64).
        against: With --bits, --bytes or --loss: other quantized versions of the model, such as
            those of other tools, to compare with on the same text: Transformers folders or GGUF
            files.
        cache: With --bits, --bytes or --loss: also store keys and values in 8 bits, with scales
            from calibration text: one per tensor, or one per head (fp8_head, int8_head). Empty:
            full precision.
        tune: Steps of training the scales of the chosen formats by KL from the full-precision
            model, each on about 1,024 further tokens of calibration text. The trained scales
            are used only if they lower the KL on other text.
        tuning_state: File that stores the state of --tune, from which the same command
            continues.

    `out` is a run directory to write, `save` a folder for the model as compressed-tensors; neither
    may exist.

    Raises:
        WakefulError: a model, a scheme or the text cannot be read, a scheme does not fit a layer's
            width or needs calibration text, compressed-tensors does not support what `save` asks
            for, or `out` or `save` exists. Results of models before that one are written to `out`.
    """

@overload
def quantize(
    model: Sequence[Source],
    *schemes: str | Scheme,
    tokenizer: Tokenizer = None,
    display: DisplayFactory | None = None,
    options: QuantizeOptions | None = None,
    figures: Iterable[Literal["svg", "png", "pdf"]] | Literal["svg", "png", "pdf"] = (),
    text: str | PathLike[str] = "",
    length: int = 0,
    bos: Literal["auto", "on", "off"] = "auto",
    out: str | PathLike[str] = "",
    device: str = "auto",
    dtype: Literal["float32", "float64", "bfloat16"] = "float32",
    trust_remote_code: bool = False,
    scheme: Iterable[str] | str = (),
    num_sequences: int = 8,
    calibration_sequences: int = 16,
    calibration_text: Iterable[str | PathLike[str]] | str | PathLike[str] = (),
    save: str | PathLike[str] = "",
    skip: Iterable[str] | str = (),
    sensitivity: bool = False,
    for_: Literal["vllm", "llama.cpp"] = "vllm",
    bits: float = 0.0,
    bytes: int = 0,
    loss: float = 0.0,
    rotation: str = "",
    against: Iterable[str] | str = (),
    cache: Literal["", "fp8", "int8", "fp8_head", "int8_head"] = "",
    tune: int = 0,
    tuning_state: str | PathLike[str] = "",
) -> QuantizationMatrix:
    """Quantize models' linear layers and caches, and measure the damage on a text.

        small = wakeful.quantize("smollm2", "coarse").model
        wakeful.quantize("smollm2", "fine", "w4", text="book.txt")
        wakeful.quantize(["smollm2", "cured"], "coarse", "w4g128_gptq", "nvfp4", text="book.txt")

    The models themselves stay unchanged. A single model is measured only with `text`, `out`,
    `sensitivity`, or a budget of `bits`, `bytes` or `loss`.

    Args:
        model: a name, a path, what `wakeful.load` returned, or a module in memory; or a list of
            several, which are measured one after another.
        schemes: names or expressions, as in `QuantizeOptions.scheme`, or `Scheme` objects.
        tokenizer: the tokenizer of a module in memory.
        display: shows progress; None shows a bar in a terminal.
        figures: Also write the charts for a paper, in these formats, into the folder figures.
        text: Text to read: a file, folder or glob, hf:NAME, or a task: backcopy(triggers=3).
            Empty: a run's own task, or python-stdlib.
        length: Tokens per sequence. 0: 512, or the model's context where that is shorter.
        bos: BOS before every sequence: as the model's own tokenizer does (auto), on, or off.
        out: Folder to create. Empty: runs/VERB-MODEL, numbered where that exists.
        device: auto, cpu, cuda ...
        dtype: Arithmetic of the full-precision model; what is measured is float32 or better.
        trust_remote_code: Run code that comes with the model. Leave it out for models you do
            not trust.
        scheme: A scheme's name (listed below) or expression: scheme(weights=absmax(bits=6,
            per="channel")). None: fine, moderate, coarse, w4. With --bits, --bytes or --loss:
            formats to choose from instead of the engine's.
        num_sequences: Sequences to measure on, one after another from the text's beginning.
        calibration_sequences: Calibration sequences for static scales, methods and caches that
            need them.
        calibration_text: Texts to calibrate on, named as for --text, with equally many
            sequences from each. None: the sequences that follow the measured ones.
        save: Folder to create with the quantized model in the format compressed-tensors, which
            Transformers and vLLM load. Needs a single scheme that the format supports.
        skip: Layers to leave in full precision, by name or pattern: lm_head, *.down_proj.
        sensitivity: Rank layers by the loss increase when each alone is quantized. Needs a
            single scheme.
        for_: Engine whose formats --bits, --bytes and --loss choose from. llama.cpp: Q4_0,
            Q5_0, Q8_0 and F16, also for embeddings and head; --save NAME.gguf writes the file,
            NAME.txt the flags of llama-quantize.
        bits: Choose a format for each layer, with at most this many bits per weight on average,
            scales included, embeddings and head not. 0: every layer has the same scheme.
        bytes: Choose a format for each layer, with at most this many bytes for the whole file.
        loss: Choose a format for each layer, with the fewest bytes that raise the loss by at
            most this many nats per token.
        rotation: With --bits, --bytes or --loss: rotate the model before its formats are
            chosen. auto: try values, hadamard and blocks as wide as the format's groups on
            calibration text, and use the best if its 95% interval shows that it helps and the
            file does not grow. Or name one: values, hadamard, block_diagonal(size=64).
        against: With --bits, --bytes or --loss: other quantized versions of the model, such as
            those of other tools, to compare with on the same text: Transformers folders or GGUF
            files.
        cache: With --bits, --bytes or --loss: also store keys and values in 8 bits, with scales
            from calibration text: one per tensor, or one per head (fp8_head, int8_head). Empty:
            full precision.
        tune: Steps of training the scales of the chosen formats by KL from the full-precision
            model, each on about 1,024 further tokens of calibration text. The trained scales
            are used only if they lower the KL on other text.
        tuning_state: File that stores the state of --tune, from which the same command
            continues.

    `out` is a run directory to write, `save` a folder for the model as compressed-tensors; neither
    may exist.

    Raises:
        WakefulError: a model, a scheme or the text cannot be read, a scheme does not fit a layer's
            width or needs calibration text, compressed-tensors does not support what `save` asks
            for, or `out` or `save` exists. Results of models before that one are written to `out`.
    """

def inherit(
    reference: Source | None = None,
    *,
    tokenizer: Tokenizer = None,
    display: DisplayFactory | None = None,
    options: InheritOptions | None = None,
    figures: Iterable[Literal["svg", "png", "pdf"]] | Literal["svg", "png", "pdf"] = (),
    out: str | PathLike[str] = "",
    resume: str | PathLike[str] = "",
    layers: int = 0,
    keep: float = 0.0,
    choose: Literal["angle", "first"] = "angle",
    blocks: Iterable[int] | int = (),
    bridge: BridgeConfig | Mapping[str, Any] = ...,
    heal: HealConfig | Mapping[str, Any] = ...,
    bos: Literal["auto", "on", "off"] = "auto",
    route: str = "",
    normalizer: str = "",
    grow: int = 0,
    until: Literal["parity", "budget"] = "parity",
    rounds: int = 0,
    baseline: Iterable[Literal["random", "reference"]] | Literal["random", "reference"] = (),
    recipe: Literal["wakeful", "inheritune"] = "wakeful",
    data: DataConfig | Mapping[str, Any] = ...,
    optimizer: OptimizerConfig | Mapping[str, Any] = ...,
    train: TrainConfig | Mapping[str, Any] = ...,
    text: str | PathLike[str] = ...,
    validation_text: str | PathLike[str] = ...,
    validation_fraction: float = ...,
    steps: int = ...,
    batch_size: int = ...,
    length: int = ...,
    eval_every: int = ...,
    seed: int = ...,
    device: str = ...,
    dtype: Literal["float32", "float64", "bfloat16"] = ...,
    lr: float = ...,
) -> Inheritance:
    """Start a smaller model from a reference's blocks, train it, and compare it with baselines.

        wakeful.inherit("smollm2", layers=15, text="book.txt", steps=200, baseline=["random"])

    Args:
        reference: a name, a path, what `wakeful.load` returned, or a module in memory, which is
            exported into the folder so that the work can be resumed.
        tokenizer: replaces the reference's own; required for a module; may be a path.
        display: shows progress; None is a bar where there is a terminal.
        figures: Also write the charts for a paper, in these formats, into the folder figures.
        out: Folder to create. Empty: runs/inherit-REFERENCE.
        resume: Continue the inheritance in this folder; it takes no other option but figures.
        layers: Layers of the heir. 0: as many as keep says, or half of the reference's.
        keep: Share of the reference's layers to keep, instead of layers.
        choose: Rule for the layers: all but the neighbors over which the stream turns least
            (angle), or the first, as the paper has them.
        blocks: The layers themselves, counted from 0, instead of layers, keep and choose.
        bridge: Fields of `BridgeConfig`, or a table of them.
        heal: Fields of `HealConfig`, or a table of them.
        bos: BOS before every window that heirs and reference read: as the reference's own
            tokenizer does (auto), on, or off.
        route: Value route to switch on, e.g. resformer(mode="learnable"). Empty: the
            reference's.
        normalizer: Normalizer to switch on, e.g. softmax1. Empty: the reference's.
        grow: Layers that each round adds, 2 in the paper; the last may add fewer. 0: one round.
        until: Grow until the reference's loss is reached, or through all rounds.
        rounds: Maximum rounds. 0: until the heir is as deep as the reference.
        baseline: Models to train beside the heir for as many steps on the text: its shape from
            random weights, or the whole reference.
        recipe: Defaults: our own, or a paper's. inheritune copies the first layers, trains on
            the text, and adds two layers of the reference per round until its loss is reached.
            Other options overrule these.
        data: Fields of `DataConfig`, or a table of them.
        optimizer: Fields of `OptimizerConfig`, or a table of them.
        train: Fields of `TrainConfig`, or a table of them.
        text: python-stdlib, a file, folder or glob (text, JSONL, parquet), hf:NAME, prepared
            data, a task: backcopy(triggers=3), or mixture(parts=[("NAME", "SOURCE", WEIGHT),
            ...]).
        validation_text: Text to validate on. Empty: validation_fraction of the documents of the
            source.
        validation_fraction: Share of documents held out, chosen by a hash of their text.
        steps: Optimizer steps.
        batch_size: Sequences per step.
        length: Tokens per sequence. Of an heir 0 means 256, or its reference's shorter context.
        eval_every: Steps between evaluations of the full validation set. 0 means only at the
            end; of an heir, every fifth of the steps.
        seed: Seed of the initial weights and of the data order.
        device: auto (a GPU where there is one), cpu, cuda, cuda:1 ...
        dtype: Arithmetic of the forward pass; bfloat16 is mixed precision over float32 weights.
        lr: Peak learning rate.
        kwargs: those fields; with `resume`, which names a folder to go on with, only `figures`.

    The folder gets recipe.toml, a training run for each heir and baseline, plan.json,
    reference.parquet, summary.json and report.html. With `heal={"by": "none"}` nothing is trained,
    and the folder is the bridged heir as Transformers loads it, with inherit.json and report.html;
    the result's `untrained`, otherwise None, has its losses in each window.
    Nothing is written before everything that can be checked has been.

    Raises:
        WakefulError: the reference or the text cannot be read, its architecture cannot be inherited
            from, the layers do not fit it, `out` exists, or a run fails.
            Files that existed before are kept.
    """

def generate(
    model: Source,
    prompt: str,
    *,
    tokenizer: Tokenizer = None,
    options: GenerateOptions | None = None,
    num_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    chat: bool = False,
    bos: Literal["auto", "on", "off"] = "auto",
    step: int = 0,
    device: str = "auto",
) -> str:
    """Return the text that continues a prompt.

        wakeful.generate("runs/first", "def main(", temperature=0.7)

    Args:
        model: a name, a path, what `wakeful.load` returned, or a module in memory.
        prompt: text to continue; an empty prompt stands for the start of a document.
        tokenizer: the tokenizer of a module in memory.
        num_tokens: Maximum number of tokens to generate.
        temperature: Divides the logits; 0 takes the likeliest token every time.
        top_k: Sample from this many of the likeliest tokens; 0 means all.
        top_p: Choose among the likeliest tokens that together reach this probability.
        seed: Seed of the choice.
        chat: The prompt is what a user says, and the model answers, by its chat template.
        bos: BOS before the prompt: as the model's own tokenizer does (auto), on, or off.
        step: Checkpoint of a run to use, by its step. 0 means the newest.
        device: auto, cpu, cuda ...

    Raises:
        WakefulError: an option is out of its range, the context too short, or the chat template
            cannot be used.
    """

def export(
    model: Source,
    folder: str | PathLike[str],
    *,
    tokenizer: Tokenizer = None,
    display: DisplayFactory | None = None,
    options: ExportOptions | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    gguf: Literal["auto", "f32", "f16", "q8_0", "q4_0"] = "auto",
    step: int = 0,
) -> str:
    """Write a model and its tokenizer to a folder that Transformers loads; return its model type.

        wakeful.export("runs/first", "first-for-everybody")
        wakeful.export("smollm2", "smollm2.gguf", gguf="q8_0")

    Args:
        model: a name, a path, what `wakeful.load` returned, or a module in memory.
        folder: must not exist. A name that ends in .gguf is a file for llama.cpp, which holds stock
            architectures.
        tokenizer: replaces the model's own; required for a module; may be a path.
        display: shows progress; None is a bar where there is a terminal.
        dtype: Type of the weights written to a folder. auto: as they are stored, a run's in
            float32.
        gguf: Type of the matrices in a file NAME.gguf. auto: f16. llama.cpp makes other types
            of it.
        step: Checkpoint of the run to write, by its step. 0 means the newest.

    Raises:
        WakefulError: the model cannot be read, or the folder exists or cannot be written.
    """
