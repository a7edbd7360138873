"""Verbs of the command line: options, help, and functions that take the arguments after the name.

The tools are imported after the options are parsed.
"""

import dataclasses
import os
import sys
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, cast

import wakeful
from wakeful.cli.command import (
    asks_for_help,
    build_overview,
    choose_out,
    parse_arguments,
    print_help,
)
from wakeful.cli.console import (
    is_secondary_process,
    print_line,
    print_result,
    progress_display,
    read_standard_input,
    write_text,
)
from wakeful.config.keywords import NoOptions, fill_options
from wakeful.config.options import HowMuch, What, Where
from wakeful.config.reading import REFERENCES, SOURCES, FigureOptions
from wakeful.config.rows import change_rows, read_rows
from wakeful.config.schema import TRAINED, Config, TextConfig, load_config, select_variants
from wakeful.config.tables import (
    TomlTable,
    merge_over_preset,
    preset_names,
    read_preset,
    read_preset_table,
)
from wakeful.curing.options import CureOptions
from wakeful.diagnosis.options import DiagnoseOptions
from wakeful.errors import WakefulError, did_you_mean
from wakeful.evaluation.options import EvaluateOptions
from wakeful.exporting.options import ExportOptions
from wakeful.generation.options import GenerateOptions
from wakeful.inheritance.options import InheritOptions
from wakeful.quantization.options import QuantizeOptions
from wakeful.reporting.options import ReportOptions
from wakeful.variants.plugins import Verb, group_entry_points, load_plugin_verb

PARTS = ("softmax1", "orthoadam", "value_residual", "rmsnorm_single", "inherit_layers")
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, kw_only=True)
class _ConfigOptions(Config, FigureOptions):
    """Options of a verb in addition to every field of a configuration."""

    @property
    def config(self) -> Config:
        """The configuration alone, without the verb's own options."""
        fields = dataclasses.fields(Config)
        return Config(**{entry.name: getattr(self, entry.name) for entry in fields})


@dataclass(frozen=True, kw_only=True)
class TrainOptions(_ConfigOptions):
    """Folder of the run, and changes to its configuration.

    Every field of the configuration is an option; wakeful presets CONFIG prints a preset's values.
    """

    out: Where[str] = ""
    """Run directory to create. Empty: runs/NAME."""
    resume: Where[str] = ""
    """Continue the run in this directory with its own configuration; --train.steps lengthens it."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(_ConfigOptions):
    """Folder of the comparison, and changes to its configurations.

    A field of the configuration is set for every variant, unless they differ in it.
    """

    out: Where[str] = ""
    """Folder to create. Empty: runs/compare-NAME."""
    seeds: HowMuch[tuple[int, ...]] = ()
    """Seeds to train every variant with. Empty: those of the file, or 0."""
    only: What[tuple[str, ...]] = ()
    """Variants to train, by name; the first of the file that is among them is the baseline."""
    baseline: What[str] = ""
    """Variant that the others are compared with. Empty: the first."""
    resume: Where[bool] = False
    """Resume an interrupted comparison in the same folder."""
    cluster: Where[str] = ""
    """Distribute rows and seeds over workers: "local(workers=2)",
    "slurm(workers=8, partition='a')" ..."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(TextConfig):
    """Turn text into memory-mapped tokens."""

    out: Where[str]
    """Folder to create."""

    RULES = (TRAINED,)


@dataclass(frozen=True, kw_only=True)
class PromptOptions(GenerateOptions):
    """Continuation of a prompt."""

    prompt: What[str]
    """Text to continue. A single dash reads it from standard input."""


def train(arguments: list[str]) -> None:
    """Run `wakeful train CONFIG`, or continue a run with --resume, and print the result.

    Raises:
        WakefulError: no configuration or several are named, an option is refused, or --resume comes
            with an option that would change the run.
    """
    sources, table = parse_verb("train", arguments)
    if len(sources) > 1:
        raise WakefulError(f"train takes one configuration, not {len(sources)}: {sources}")
    if not sources and not table.get("resume"):
        raise WakefulError(
            "name a configuration: a TOML file or a preset; wakeful presets lists them"
        )
    config = load_config(sources[0] if sources else {})
    # The configuration's values are the defaults of the options.
    options = fill_options(TrainOptions, table, TrainOptions(**vars(config)))
    if not options.resume:
        result = wakeful.train(
            options.config, out=options.out, figures=options.figures, display=progress_display
        )
        print_result(result)
        return
    train_table = table.get("train", {})
    if sources or table.keys() - {"resume", "train", "figures"} or train_table.keys() - {"steps"}:
        raise WakefulError(
            "--resume takes the run's own configuration and no other option but --train.steps, "
            "which lengthens the run, and --figures"
        )
    result = wakeful.train(
        resume=options.resume, steps=train_table.get("steps", 0), figures=options.figures,
        display=progress_display,
    )  # fmt: skip
    print_result(result)


def compare(arguments: list[str]) -> None:
    """Run `wakeful compare CONFIG...`: train every variant with every seed and print the result."""
    sources, table = parse_verb("compare", arguments)
    if not sources:
        raise WakefulError("name one configuration with a [variants] table, or several")
    rows = read_rows(sources)
    base = next(iter(rows.variants.values()))
    # Of these options only the verb's own are used: `changes` are made in every variant.
    options = fill_options(CompareOptions, table, CompareOptions(**vars(base)))
    changes = {key: value for key, value in table.items() if key in vars(base)}
    variants = change_rows(select_variants(rows.variants, options.only), changes)

    from wakeful.training.comparison import compare

    result = compare(
        *variants.values(), seeds=rows.choose_seeds(options.seeds),
        out=options.out or f"runs/compare-{rows.name}", layouts=rows.layouts,
        resume=options.resume, cluster=options.cluster, baseline=options.baseline,
        figures=options.figures, display=progress_display,
    )  # fmt: skip
    print_result(result, result.page)


def generate(arguments: list[str]) -> None:
    """Run `wakeful generate MODEL` and print the continuation of the prompt while it is written."""
    models, options = read_arguments("generate", arguments)
    model = _single_model(models)
    prompt = read_standard_input() if options.prompt == "-" else options.prompt

    # Progress bars of other libraries, which may unpack weights late, would interrupt the text.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import transformers

    from wakeful.generation.tool import stream_text

    transformers.logging.disable_progress_bar()
    pieces = stream_text(model, prompt, options=options)
    if not options.chat:  # a continuation is printed after its prompt, an answer alone
        write_text(prompt)
    for piece in pieces:
        write_text(piece)
    write_text("\n")


def diagnose(arguments: list[str]) -> None:
    """Run `wakeful diagnose MODEL...` and print its result."""
    models, options = _read_models("diagnose", arguments)
    result = wakeful.diagnose(*models, options=options, display=progress_display)
    print_result(result, Path(options.out) / "report.html")


def inherit(arguments: list[str]) -> None:
    """Run `wakeful inherit REFERENCE`, or continue with --resume, and print the result."""
    sources, options = read_arguments("inherit", arguments)
    if options.resume:
        only_allowed = InheritOptions(resume=options.resume, figures=options.figures)
        if sources or options != only_allowed:
            raise WakefulError(
                "--resume takes the inheritance's own recipe and no other option but --figures"
            )
    elif len(sources) != 1:
        raise WakefulError(f"name one reference: {REFERENCES}")
    result = wakeful.inherit(*sources, options=options, display=progress_display)
    print_result(result, result.page)


def cure(arguments: list[str]) -> None:
    """Run `wakeful cure MODEL` and print the cured model's folder and the result."""
    models, options = read_arguments("cure", arguments)
    options = choose_out("cure", [_single_model(models)], options)
    result = wakeful.cure(*models, options=options, display=progress_display)
    # `stock` is the model type, by which Transformers loads the folder.
    print_line(f"cured model ({result.stock}): {options.out}")
    print_result(result, Path(options.out) / "report.html")


def evaluate(arguments: list[str]) -> None:
    """Run `wakeful evaluate MODEL...` and print its result."""
    models, options = _read_models("evaluate", arguments)
    result = wakeful.evaluate(*models, options=options, display=progress_display)
    print_result(result, Path(options.out) / "report.html")


def quantize(arguments: list[str]) -> None:
    """Run `wakeful quantize MODEL...` and print the result and the folder of a saved model."""
    models, options = _read_models("quantize", arguments)
    model_or_models = models if len(models) > 1 else models[0]
    result = wakeful.quantize(model_or_models, options=options, display=progress_display)
    if options.save:
        print_line(f"quantized model: {options.save}")
    print_result(result, Path(options.out) / "report.html")


def _read_models(verb: str, arguments: list[str]) -> tuple[list[str], Any]:
    """Read the arguments of a verb that takes at least one model; return the models and the
    options, in which an output folder is chosen if the arguments name none.
    """
    models, options = read_arguments(verb, arguments)
    return models, choose_out(verb, models, options)


def prepare(arguments: list[str]) -> None:
    """Run `wakeful prepare SOURCE...` and print how many tokens were written where."""
    sources, options = read_arguments("prepare", arguments)
    if not sources:
        raise WakefulError("name a source: python-stdlib, a file, folder or glob, or hf:NAME")

    from wakeful.data.preparing import prepare as prepare_text

    with progress_display("prepare") as show:
        data = prepare_text(sources, options.out, progress=show.stage, options=options)
    print_line(
        f"{data.train.num_tokens:,} training and {data.validation.num_tokens:,} validation tokens "
        f"of a vocabulary of {data.vocab_size:,} are in {options.out}; use them with "
        f"--data.source {options.out}"
    )


def report(arguments: list[str]) -> None:
    """Run `wakeful report RUN...` and print the report and the path of its page."""
    folders, options = read_arguments("report", arguments)
    result = wakeful.report(*folders, **vars(options))
    print_result(result, result.page)


def export(arguments: list[str]) -> None:
    """Run `wakeful export MODEL DIR` and print how to load the model that was written."""
    paths, options = read_arguments("export", arguments)
    if len(paths) != 2:
        raise WakefulError(
            "name a model to export and a folder or a file NAME.gguf to write: wakeful export "
            "MODEL DIR"
        )
    model_type = wakeful.export(paths[0], paths[1], display=progress_display, options=options)
    if paths[1].endswith(".gguf"):
        print_line(f"{model_type}: {paths[1]}")
        return
    # A folder of the type "wakeful" holds the model's code, which Transformers must be told to run.
    trust_argument = ", trust_remote_code=True" if model_type == "wakeful" else ""
    print_line(f'{model_type}: AutoModelForCausalLM.from_pretrained("{paths[1]}"{trust_argument})')


def presets(arguments: list[str]) -> None:
    """Run `wakeful presets`: list all presets, or print the TOML text of the one named."""
    names, _ = read_arguments("presets", arguments)
    if len(names) > 1:
        raise WakefulError(f"name one preset, not {len(names)}: {', '.join(names)}")
    if names:
        sys.stdout.write(read_preset(names[0]))
        return
    for several, verb in ((False, "train"), (True, "compare")):
        print_line(f"wakeful {verb}")
        for name in list_presets(several=several):
            print_line(f"  {name}: {read_preset(name).splitlines()[0].removeprefix('# ')}")


def completion(arguments: list[str]) -> None:
    """Run `wakeful completion SHELL`: print the script by which the shell completes verbs and
    options.
    """
    shells, _ = read_arguments("completion", arguments)
    if len(shells) != 1 or shells[0] not in SHELLS:
        hint = did_you_mean(shells[0], SHELLS) if shells else ""
        raise WakefulError(f"name one shell: wakeful completion bash, zsh or fish{hint}")
    app = build_overview(all_verbs(), wakeful.__version__, "", with_options=True)
    sys.stdout.write(app.generate_completion(shell=cast(Any, shells[0])))


def parts(arguments: list[str]) -> None:
    """Run `wakeful parts PART`: print the source of one self-contained module, such as softmax1."""
    names, _ = read_arguments("parts", arguments)
    if len(names) != 1 or names[0] not in PARTS:
        hint = did_you_mean(names[0], PARTS) if names else ""
        raise WakefulError(f"name one part: {', '.join(PARTS)}{hint}")
    sys.stdout.write(resources.files("wakeful.parts").joinpath(f"{names[0]}.py").read_text("utf-8"))


def list_presets(*, several: bool) -> list[str]:
    """Return the names of the presets that describe a single run; with `several`, return instead
    those that describe several variants to compare.
    """
    tables = {name: merge_over_preset(read_preset_table(name), name) for name in preset_names()}
    return [name for name, table in tables.items() if ("variants" in table) == several]


def all_verbs() -> dict[str, Verb]:
    """Return every verb by name, including those that installed packages add."""
    return VERBS | {
        name: verb for name in group_entry_points("verbs") if (verb := load_plugin_verb(name))
    }


def find_verb(name: str) -> Verb:
    """Return the verb of this name.

    Raises:
        WakefulError: there is none.
    """
    verbs = all_verbs()
    if name not in verbs:
        hint = did_you_mean(name, verbs)
        raise WakefulError(f"unknown verb {name!r}{hint}; there are {', '.join(verbs)}")
    return verbs[name]


def parse_verb(name: str, arguments: list[str]) -> tuple[list[str], TomlTable]:
    """Parse a verb's arguments into its names (models, runs ...) and a table of the options given.
    If they ask for help, print it and exit.
    """
    verb = all_verbs()[name]
    if asks_for_help(arguments):
        if not is_secondary_process():
            print_help(name, verb, arguments)
        sys.exit(0)
    return parse_arguments(name, verb, arguments)


def read_arguments(name: str, arguments: list[str]) -> tuple[list[str], Any]:
    """Read a verb's arguments into its names (models, runs ...) and its options, a dataclass with
    defaults for what is not given. If they ask for help, print it and exit.
    """
    names, table = parse_verb(name, arguments)
    return names, fill_options(all_verbs()[name].options, table)


VERBS: dict[str, Verb] = {
    "train": Verb(
        summary="Train one model from a TOML file or a preset.",
        usage="CONFIG", options=TrainOptions, run=train, names=partial(list_presets, several=False),
        examples=(
            ("wakeful train cpu-tiny --out runs/first",
             "Train a small Llama-like model on the Python standard library, in minutes."),
            ("wakeful train cpu-tiny --model.route resformer --train.steps 1000",
             "The same preset with ResFormer's value route, for 1,000 steps."),
        ),
    ),
    "compare": Verb(
        summary="Train variants with several seeds; report paired differences.",
        usage="CONFIG...", options=CompareOptions, run=compare,
        names=partial(list_presets, several=True),
        examples=(
            ("wakeful compare patient --seeds 0 --only vanilla large-sink",
             "Watch a one-layer model grow an attention sink, and its twin grow none."),
            ("wakeful compare demo --seeds 0 1 2 --optimizer.lr 2e-3",
             "Train four variants with three seeds each, all at another learning rate."),
        ),
    ),
    "generate": Verb(
        summary="Continue a prompt with a trained, pretrained or quantized model.",
        usage="MODEL", options=PromptOptions, run=generate,
        examples=(
            ('wakeful generate smollm2 --prompt "Once upon a time"',
             "Stream a continuation by a pretrained model."),
            ('wakeful generate runs/first --prompt "def main(" --temperature 0',
             "Continue with a model of your own, always with the likeliest token."),
            ('wakeful generate smollm2 --chat --prompt "What is gravity?"',
             "Answer what a user says, by the model's chat template."),
        ),
    ),
    "diagnose": Verb(
        summary="Measure where a model wastes its attention and channels.",
        usage="MODEL...", options=DiagnoseOptions, run=diagnose,
        examples=(
            ("wakeful diagnose smollm2 --text book.txt",
             "Find the lazy layers, sinks and outliers of a model; the page says where they are."),
            ("wakeful diagnose runs/first runs/second --figures svg",
             "Compare two models side by side and write the charts for a paper."),
        ),
    ),
    "inherit": Verb(
        summary="Turn a pretrained model into a smaller one that matches it.",
        usage="REFERENCE", options=InheritOptions, run=inherit,
        examples=(
            ("wakeful inherit smollm2 --keep 0.5 --steps 500",
             "Keep half the layers of a model and heal what is left for 500 steps."),
            ("wakeful inherit runs/first --layers 4 --steps 50 --baseline random",
             "Take four layers of a run of your own, and train a random start beside them."),
            ("wakeful inherit runs/first --recipe inheritune --steps 100",
             "Inheritune, as its paper has it: the first half, trained and grown until parity."),
        ),
    ),
    "cure": Verb(
        summary="Remove a model's outliers and sinks, with little or no training.",
        usage="MODEL", options=CureOptions, run=cure, argument_help={"MODEL": REFERENCES},
        examples=(
            ("wakeful cure smollm2 --rotate hadamard --prefix auto",
             "Rotate outliers away and store the sink's token, without training."),
            ("wakeful cure runs/first --sinks", "Give every head a sink, fitted to the model."),
        ),
    ),
    "evaluate": Verb(
        summary="Measure how well a model predicts: perplexity, LAMBADA, multiple choice.",
        usage="MODEL...", options=EvaluateOptions, run=evaluate,
        examples=(
            ("wakeful evaluate runs/first runs/second --text book.txt",
             "Compare the perplexity of two models on the same text."),
            ("wakeful evaluate smollm2 --lambada lambada.jsonl --limit 200",
             "Predict the last word of 200 passages."),
            ("wakeful evaluate smollm2 heir --texts wiki.txt code.txt --speed 128 1024",
             "Compare perplexity on two texts, and what each model costs to serve."),
        ),
    ),
    "quantize": Verb(
        summary="Quantize a model's linear layers; measure the damage; save it smaller.",
        usage="MODEL...", options=QuantizeOptions, run=quantize,
        argument_help={"MODEL": REFERENCES},
        examples=(
            ("wakeful quantize smollm2 --scheme fine w4",
             "Measure what 8 and 4 bits cost."),
            ("wakeful quantize smollm2 --scheme w8a8 --save smollm2-w8",
             "Write a model of 8 bits, which Transformers, vLLM and every verb load."),
        ),
    ),
    "prepare": Verb(
        summary="Prepare text as memory-mapped tokens to train on.",
        usage="SOURCE...", options=PrepareOptions, run=prepare,
        examples=(
            ("wakeful prepare notes/*.txt --out data/notes --vocab_size 8000",
             "Turn text files into tokens, with a tokenizer trained on them."),
            ("wakeful prepare hf:roneneldan/TinyStories --out data/stories",
             "Do the same with a dataset of the Hugging Face hub."),
        ),
    ),
    "report": Verb(
        summary="Write one offline HTML page about runs.",
        usage="RUN...", options=ReportOptions, run=report,
        examples=(
            ("wakeful report runs/compare-patient",
             "Write the page of a comparison again."),
            ("wakeful report runs/first runs/second --out both.html",
             "Set two runs side by side on one page."),
        ),
    ),
    "export": Verb(
        summary="Write a model as a folder that Transformers loads, or as one GGUF file.",
        usage="MODEL DIR", options=ExportOptions, run=export, argument_help={"MODEL": REFERENCES},
        examples=(
            ("wakeful export runs/first first-for-everybody",
             "Write a folder for AutoModelForCausalLM.from_pretrained."),
            ("wakeful export runs/first first.gguf --gguf q8_0",
             "Write one file for llama.cpp, with matrices of 8 bits."),
        ),
    ),
    "presets": Verb(
        summary="List the configurations that come with wakeful, or print one.",
        usage="[PRESET]", options=NoOptions, run=presets, names=preset_names,
        examples=(
            ("wakeful presets",
             "List what comes with wakeful."),
            ("wakeful presets cpu-tiny",
             "Print one, as a starting point for a file of your own."),
        ),
    ),
    "parts": Verb(
        summary="Print softmax-1, OrthoAdam and others as one file to copy.",
        usage="PART", options=NoOptions, run=parts, names=lambda: PARTS,
        examples=(
            ("wakeful parts softmax1 > softmax1.py",
             "Take softmax-1's fused attention into training code of your own."),
            ("wakeful parts orthoadam > orthoadam.py",
             "Take the optimizer."),
        ),
    ),
    "completion": Verb(
        summary="Print a shell completion script for bash, zsh or fish.",
        usage="SHELL", options=NoOptions, run=completion, names=lambda: SHELLS,
        examples=(
            ("wakeful completion bash > ~/.local/share/bash-completion/completions/wakeful",
             "Complete verbs and options with the tab key, from the next shell on."),
            ("wakeful completion fish > ~/.config/fish/completions/wakeful.fish",
             "The same for fish."),
        ),
    ),
}  # fmt: skip
"""Verbs in the order of the overview. Installed packages add others."""


def _single_model(models: list[str]) -> str:
    """Return the one model that arguments name, or raise `WakefulError`."""
    if len(models) != 1:
        raise WakefulError(f"name one model, not {len(models)}: {SOURCES}")
    return models[0]
