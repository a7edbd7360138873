"""Verbs of the command line: options, help, and functions that take the arguments after the name.

The tools are imported after the options are parsed.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, cast

import wakeful
from wakeful.cli.command import (
    asks_for_help,
    build_overview,
    choose_out,
    parse_arguments,
    print_help,
    split_row_options,
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
from wakeful.config.rows import read_rows, rescale_rows
from wakeful.config.schema import TRAINED, Config, TextConfig, load_config, select_variants
from wakeful.config.tables import merge_over_preset, preset_names, read_preset, read_preset_table
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

    Every field of the configuration is an option. Name a CONFIG to see its own values as defaults:
    wakeful train cpu-tiny --help.
    """

    out: Where[str] = ""
    """Run directory to create. Empty: runs/NAME."""
    resume: Where[str] = ""
    """Continue the run in this directory with its own configuration; --train.steps lengthens it."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(_ConfigOptions):
    """Folder of the comparison, and changes to its configurations.

    A field of the configuration is set for every variant; numbers in which variants differ keep
    their ratios. --variants.NAME.FIELD sets it for one.
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
    """Run `wakeful train CONFIG`, or continue a run with --resume, and print the result."""
    if asks_for_help(arguments):
        config = load_config(_first_name(arguments) or {})
        show_help("train", arguments, TrainOptions(**vars(config)))
    sources, table = parse_arguments("train", VERBS["train"], arguments)
    if len(sources) > 1:
        raise WakefulError(f"train takes one configuration, not {len(sources)}: {sources}")
    if not sources and not table.get("resume"):
        raise WakefulError(
            "name a configuration: a TOML file or a preset; wakeful presets lists them"
        )
    config = load_config(sources[0] if sources else {})
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
    """Run `wakeful compare CONFIG...`: train every variant (a row of the comparison) with every
    seed and print the result.
    """
    if asks_for_help(arguments):
        name = _first_name(arguments)
        base = next(iter(read_rows([name]).variants.values())) if name else Config()
        show_help("compare", arguments, CompareOptions(**vars(base)))
    verb = VERBS["compare"]
    # The names of configurations come first, and say which rows options may name.
    num_names = next(
        (n for n, argument in enumerate(arguments) if argument.startswith("-")), len(arguments)
    )
    if not num_names:
        raise WakefulError("name one configuration with a [variants] table, or several")
    rows = read_rows(arguments[:num_names])
    shared, by_row = split_row_options(arguments[num_names:], list(rows.variants))
    base = next(iter(rows.variants.values()))
    sources, table = parse_arguments("compare", verb, shared)
    if sources:
        raise WakefulError(f"{sources[0]!r} follows no option: name configurations first")
    options = fill_options(CompareOptions, table, CompareOptions(**vars(base)))
    seeds = rows.choose_seeds(options.seeds)
    # Numbers in which the variants differ keep their ratios to the first variant's.
    variants = rescale_rows(rows.variants, base, options.config, strict=True)
    changed_rows = {name: row_arguments for name, row_arguments in by_row.items() if row_arguments}
    for name, row_arguments in changed_rows.items():
        _check_row_options(name, row_arguments)
        _, changes = parse_arguments("compare", verb, row_arguments)
        default = CompareOptions(**vars(variants[name]))
        variants[name] = fill_options(CompareOptions, changes, default).config
    variants = select_variants(variants, options.only)
    for name in changed_rows:
        if name not in variants:
            raise WakefulError(f"--variants.{name} is of a variant that --only leaves out")

    from wakeful.training.comparison import compare

    result = compare(
        *variants.values(), seeds=seeds, out=options.out or f"runs/compare-{rows.name}",
        layouts=rows.layouts, resume=options.resume, cluster=options.cluster,
        baseline=options.baseline, figures=options.figures, display=progress_display,
    )  # fmt: skip
    print_result(result, result.page)


def _first_name(arguments: list[str]) -> str:
    """Return the first of the arguments, a configuration's name; "" where it is an option."""
    return arguments[0] if not arguments[0].startswith("-") else ""


def _check_row_options(row: str, arguments: list[str]) -> None:
    """Raise `WakefulError` where an option of the whole comparison, such as --seeds, is given for
    one row: `--variants.ROW.seeds`, which is "--seeds" in the row's `arguments`.
    """
    shared = vars(CompareOptions()).keys() - vars(Config()).keys()
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--")
        field = name.replace("-", "_").removeprefix("no_")
        if argument.startswith("--") and field in shared:
            raise WakefulError(
                f"--variants.{row}.{name} would do nothing: --{name} is for the whole comparison"
            )


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
        allowed = InheritOptions(resume=options.resume, figures=options.figures)
        if sources or options != allowed:
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
    """Read the models and the options of a verb that takes at least one model; return both, with an
    output folder chosen where the options give none.
    """
    models, options = read_arguments(verb, arguments)
    return models, choose_out(verb, models, options)


def prepare_data(arguments: list[str]) -> None:
    """Run `wakeful data prepare SOURCE...` and print how many tokens were written where."""
    sources, options = read_arguments("data prepare", arguments)
    if not sources:
        raise WakefulError("name a source: python-stdlib, a file, folder or glob, or hf:NAME")

    from wakeful.data.preparing import prepare

    with progress_display("prepare") as show:
        data = prepare(sources, options.out, progress=show.stage, options=options)
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
    kind = wakeful.export(paths[0], paths[1], display=progress_display, options=options)
    if paths[1].endswith(".gguf"):
        print_line(f"{kind}: {paths[1]}")
        return
    trust_argument = ", trust_remote_code=True" if kind == "wakeful" else ""
    print_line(f'{kind}: AutoModelForCausalLM.from_pretrained("{paths[1]}"{trust_argument})')


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
    """Run `wakeful completion SHELL`: print the completion script for a shell."""
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
    """Return the names of the presets that describe a single run; with `several`, of those that
    describe several variants to compare.
    """
    tables = {name: merge_over_preset(read_preset_table(name), name) for name in preset_names()}
    return [name for name, table in tables.items() if ("variants" in table) == several]


def all_verbs() -> dict[str, Verb]:
    """Return every verb by name, including those that installed packages add."""
    return VERBS | {
        name: verb for name in group_entry_points("verbs") if (verb := load_plugin_verb(name))
    }


def verbs_of_group(word: str) -> list[str]:
    """Return the verbs of two words that begin with this one, such as "data prepare" of "data"."""
    return [name for name in all_verbs() if name.startswith(f"{word} ")]


def find_verb(arguments: Sequence[str]) -> tuple[str, Verb, list[str]]:
    """Return the verb's name of one or two words that arguments begin with, the verb, and the
    arguments after its name.

    Raises:
        WakefulError: there is no verb of that name.
    """
    verbs, in_group = all_verbs(), verbs_of_group(arguments[0])
    num_words = 2 if in_group else 1
    name = " ".join(arguments[:num_words])
    if name in verbs:
        return name, verbs[name], list(arguments[num_words:])
    hint = did_you_mean(name, verbs)
    if in_group:
        raise WakefulError(f"write wakeful {' or wakeful '.join(in_group)}{hint}")
    raise WakefulError(f"unknown verb {name!r}{hint}; there are {', '.join(verbs)}")


def read_arguments(name: str, arguments: list[str]) -> tuple[list[str], Any]:
    """Read a verb's arguments into its names (models, runs ...) and its options, a dataclass; for
    `--help` print the help and exit.
    """
    if asks_for_help(arguments):
        show_help(name, arguments)
    verb = all_verbs()[name]
    names, table = parse_arguments(name, verb, arguments)
    return names, fill_options(verb.options, table)


def show_help(name: str, arguments: list[str], default: Any = None) -> NoReturn:
    """Print a verb's help with the values of `default` as defaults, and exit."""
    if not is_secondary_process():
        print_help(name, all_verbs()[name], arguments, default)
    sys.exit(0)


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
            ("wakeful compare demo --seeds 0 1 2 --variants.softmax1.optimizer.lr 1e-3",
             "Train four variants with three seeds each, one of them with a rate of its own."),
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
    "data prepare": Verb(
        summary="Prepare text as memory-mapped tokens to train on.",
        usage="SOURCE...", options=PrepareOptions, run=prepare_data,
        examples=(
            ("wakeful data prepare notes/*.txt --out data/notes --vocab_size 8000",
             "Turn text files into tokens, with a tokenizer trained on them."),
            ("wakeful data prepare hf:roneneldan/TinyStories --out data/stories",
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
