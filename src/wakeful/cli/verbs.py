"""The verbs: their options, and what these call, which is imported once they are read.

A verb's function takes the arguments after its name.
"""

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wakeful
from wakeful.cli.console import OUT, display, finish, standard_input, tell, write
from wakeful.cli.help import asks_for_help
from wakeful.cli.parsing import SOURCES, leading, named_rows, parse, read, with_out
from wakeful.config.options import HowMuch, What, Where
from wakeful.config.rows import rescaled, rows_of
from wakeful.config.schema import Config, chosen_variants, config_from
from wakeful.config.tables import preset_text
from wakeful.config.verbs import (
    REFERENCES,
    CureOptions,
    DiagnoseOptions,
    Drawn,
    EvaluateOptions,
    ExportOptions,
    GenerateOptions,
    InheritOptions,
    NoOptions,
    PrepareOptions,
    QuantizeOptions,
    ReportOptions,
    SampleOptions,
)
from wakeful.errors import WakefulError, nearest
from wakeful.plugins import added, verb_of


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Drawn):
    """Where the demonstration goes."""

    out: Where[str] = "runs/demo"
    """Folder to create."""
    resume: Where[bool] = False
    """Resume an interrupted demonstration in the same folder."""


@dataclass(frozen=True, kw_only=True)
class _WithConfig(Config, Drawn):
    """Options of a verb's own beside every field of a configuration."""

    @property
    def config(self) -> Config:
        """The configuration."""
        fields = dataclasses.fields(Config)
        return Config(**{entry.name: getattr(self, entry.name) for entry in fields})


@dataclass(frozen=True, kw_only=True)
class TrainOptions(_WithConfig):
    """Where the run goes, and what differs from its configuration.

    Every field of the configuration is an option. Name a CONFIG to see its own values as defaults:
    wakeful train cpu-tiny --help.
    """

    out: Where[str] = ""
    """Run directory to create. Empty: runs/NAME."""
    resume: Where[str] = ""
    """Continue the run in this directory with its own configuration; --train.steps lengthens it."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(_WithConfig):
    """Where the comparison goes, and what differs from its configurations.

    A field of the configuration is set for every variant; numbers in which variants differ keep
    their ratios. --variants.NAME.FIELD sets it for one.
    """

    out: Where[str] = ""
    """Folder to create. Empty: runs/compare-NAME."""
    seeds: HowMuch[tuple[int, ...]] = ()
    """Seeds to train each variant with. Empty: those of the file, or 0."""
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
class PromptOptions(GenerateOptions):
    """How to continue a prompt."""

    prompt: What[str]
    """Text to continue. A single dash reads it from standard input."""


def demo(arguments: list[str]) -> None:
    options = parse(DemoOptions, arguments, "demo")

    from wakeful.verbs.demo import demonstrate

    done = demonstrate(options.out, resume=options.resume, figures=options.figures, shown=display)
    finish(done, done.page)


def train(arguments: list[str]) -> None:
    sources, rest = leading(arguments)
    if len(sources) > 1:
        raise WakefulError(f"train takes one configuration, not {len(sources)}: {sources}")
    default = TrainOptions(**vars(config_from(sources[0] if sources else {})))
    options = parse(TrainOptions, rest, "train CONFIG", default)
    if not sources and not options.resume:
        raise WakefulError(
            "name a configuration: a TOML file or a preset; wakeful presets lists them"
        )
    shared = {"figures": options.figures, "shown": display}
    if options.resume:
        steps = _new_length(sources, rest, options.resume)
        finish(wakeful.train(resume=options.resume, steps=steps, **shared))
    else:
        finish(wakeful.train(options.config, out=options.out, **shared))


def _new_length(sources: list[str], arguments: list[str], path: str) -> int:
    """Return the steps that --train.steps gives the run at `path`, beside which nothing may be."""
    from wakeful.runs.run import Run

    own = TrainOptions(**vars(Run.open(path).config), resume=path)
    asked = parse(TrainOptions, arguments, "train --resume RUN", own)
    steps = asked.train.steps
    train = dataclasses.replace(own.train, steps=steps)
    if sources or asked != dataclasses.replace(own, train=train, figures=asked.figures):
        raise WakefulError(
            "--resume takes the run's own configuration and no other option but --train.steps, "
            "which lengthens the run, and --figures"
        )
    return steps


def compare(arguments: list[str]) -> None:
    sources, rest = leading(arguments)
    if not sources:
        if asks_for_help(rest):
            parse(CompareOptions, rest, "compare CONFIG...", CompareOptions())
        raise WakefulError("name one configuration with a [variants] table, or several")
    rows = rows_of(sources)
    shared, own = named_rows(rest, list(rows.variants))
    prog = "compare CONFIG..."
    base = next(iter(rows.variants.values()))
    options = parse(CompareOptions, shared, prog, CompareOptions(**vars(base)))
    seeds = rows.seeds(options.seeds)
    variants = rescaled(rows.variants, base, options.config, strict=True)
    for name, asked_of_one in own.items():
        if not asked_of_one:
            continue
        _check_of_one(name, asked_of_one)
        default = CompareOptions(**vars(variants[name]))
        variants[name] = parse(CompareOptions, asked_of_one, prog, default).config
    variants = chosen_variants(variants, options.only)
    if left := [name for name, given in own.items() if given and name not in variants]:
        raise WakefulError(f"--variants.{left[0]} is of a variant that --only leaves out")

    from wakeful.verbs.compare import compare

    done = compare(
        *variants.values(), seeds=seeds, out=options.out or f"runs/compare-{rows.name}",
        layouts=rows.layouts, resume=options.resume, cluster=options.cluster,
        baseline=options.baseline, figures=options.figures, shown=display,
    )  # fmt: skip
    finish(done, done.page)


def _check_of_one(row: str, arguments: list[str]) -> None:
    """Raise `WakefulError` where an option that is of the whole comparison is given for one row."""
    whole = vars(CompareOptions()).keys() - vars(Config()).keys()
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--")
        if argument.startswith("--") and name.replace("-", "_").removeprefix("no_") in whole:
            raise WakefulError(
                f"--variants.{row}.{name} would do nothing: --{name} is for the whole comparison"
            )


def generate(arguments: list[str]) -> None:
    models, options = read(PromptOptions, arguments, "generate MODEL")
    model = _one(models)
    prompt = standard_input() if options.prompt == "-" else options.prompt

    # Bars of other libraries, which unpack weights as they are needed, would cut through the text.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import transformers

    from wakeful.verbs.generate import stream

    transformers.logging.disable_progress_bar()
    pieces = stream(model, prompt, options=options)
    write("" if options.chat else prompt)
    for piece in pieces:
        write(piece)
    write("\n")


def diagnose(arguments: list[str]) -> None:
    models, options = _several("diagnose", DiagnoseOptions, arguments)
    found = wakeful.diagnose(*models, options=options, shown=display)
    finish(found, Path(options.out) / "report.html")


def inherit(arguments: list[str]) -> None:
    sources, options = read(InheritOptions, arguments, "inherit REFERENCE")
    if options.resume:
        alone = InheritOptions(resume=options.resume, figures=options.figures)
        if sources or options != alone:
            raise WakefulError(
                "--resume takes the inheritance's own recipe and no other option but --figures"
            )
    elif len(sources) != 1:
        raise WakefulError(f"name one reference: {REFERENCES}")
    done = wakeful.inherit(*sources, options=options, shown=display)
    finish(done, done.page)


def cure(arguments: list[str]) -> None:
    models, options = read(CureOptions, arguments, "cure MODEL")
    options = with_out("cure", [_one(models)], options)
    done = wakeful.cure(*models, options=options, shown=display)
    tell(f"cured model ({done.stock}): {options.out}")
    finish(done, Path(options.out) / "report.html")


def evaluate(arguments: list[str]) -> None:
    models, options = _several("evaluate", EvaluateOptions, arguments)
    found = wakeful.evaluate(*models, options=options, shown=display)
    finish(found, Path(options.out) / "report.html")


def quantize(arguments: list[str]) -> None:
    models, options = _several("quantize", QuantizeOptions, arguments)
    given = models if len(models) > 1 else models[0]
    done = wakeful.quantize(given, options=options, shown=display)
    if options.save:
        tell(f"quantized model: {options.save}")
    finish(done, Path(options.out) / "report.html")


def _several(verb: str, kind: type, arguments: list[str]) -> tuple[list[str], Any]:
    """Return the models of a verb that takes several, and its options."""
    models, options = read(kind, arguments, f"{verb} MODEL...")
    return models, with_out(verb, models, options)


def data(arguments: list[str]) -> None:
    parts = {"prepare": _prepare, "generate": _generate_data}
    if asks_for_help(arguments[:1]):
        arguments = ["prepare", *arguments]
    if not arguments or arguments[0] not in parts:
        hint = nearest(arguments[0], parts) if arguments else ""
        raise WakefulError(
            "write: wakeful data prepare SOURCE... --out DIR, or wakeful data generate MODEL "
            f"--out DIR{hint}"
        )
    parts[arguments[0]](arguments[1:])


def _prepare(arguments: list[str]) -> None:
    sources, options = read(PrepareOptions, arguments, "data prepare SOURCE...")
    if not sources:
        raise WakefulError("name a source: python-stdlib, a file, folder or glob, or hf:NAME")

    from wakeful.data.preparing import preparation, prepare

    with display("prepare") as show:
        made = prepare(sources, options.out, progress=show.stage, **preparation(options))
    _tell_of(made, f"of a vocabulary of {made.vocab_size:,}", options.out)


def _generate_data(arguments: list[str]) -> None:
    models, options = read(SampleOptions, arguments, "data generate MODEL")
    model = _one(models)

    from wakeful.verbs.sample import sample_data

    made = sample_data(model, options=options, shown=display)
    _tell_of(made, f"that {model} wrote", options.out)


def _tell_of(made: Any, which: str, out: str) -> None:
    if made.warning:
        tell(made.warning)
    tell(
        f"{made.train.num_tokens:,} training and {made.validation.num_tokens:,} validation tokens "
        f"{which} are in {out}; use them with --data.source {out}"
    )


def report(arguments: list[str]) -> None:
    folders, options = read(ReportOptions, arguments, "report RUN...")
    done = wakeful.report(*folders, **vars(options))
    finish(done, done.page)


def export(arguments: list[str]) -> None:
    paths, options = read(ExportOptions, arguments, "export MODEL DIR")
    if len(paths) != 2:
        raise WakefulError(
            "name a model to export and a folder or a file NAME.gguf to write: wakeful export "
            "MODEL DIR"
        )
    kind = wakeful.export(paths[0], paths[1], shown=display, options=options)
    if paths[1].endswith(".gguf"):
        tell(f"{kind}: {paths[1]}")
        return
    own = ", trust_remote_code=True" if kind == "wakeful" else ""
    tell(f'{kind}: AutoModelForCausalLM.from_pretrained("{paths[1]}"{own})')


def presets(arguments: list[str]) -> None:
    names, _ = read(NoOptions, arguments, "presets [PRESET]")
    if len(names) > 1:
        raise WakefulError(f"name one preset, not {len(names)}: {', '.join(names)}")
    if names:
        sys.stdout.write(preset_text(names[0]))
        return

    from wakeful.verbs.presets import listing

    OUT.print(listing())


def completion(arguments: list[str]) -> None:
    shells, _ = read(NoOptions, arguments, "completion SHELL")
    if len(shells) != 1:
        raise WakefulError("name one shell: wakeful completion bash, zsh or fish")

    from wakeful.cli import all_verbs
    from wakeful.cli.completion import script

    others = {name: verb.options for name in added("verbs") if (verb := verb_of(name))}
    sys.stdout.write(script(shells[0], all_verbs(), KINDS | others))


KINDS: dict[str, type] = {
    "demo": DemoOptions, "train": TrainOptions, "compare": CompareOptions,
    "generate": PromptOptions, "diagnose": DiagnoseOptions, "inherit": InheritOptions,
    "cure": CureOptions, "evaluate": EvaluateOptions, "quantize": QuantizeOptions,
    "data": PrepareOptions, "data generate": SampleOptions,
    "report": ReportOptions, "export": ExportOptions, "presets": NoOptions, "completion": NoOptions,
}  # fmt: skip
"""The options of each verb, and of what is a verb of two words."""


def _one(models: list[str]) -> str:
    if len(models) != 1:
        raise WakefulError(f"name one model, not {len(models)}: {SOURCES}")
    return models[0]
