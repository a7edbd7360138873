"""The model card of an export (README.md): lineage, data, figures, and the commands behind it."""

import dataclasses
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from wakeful.config.tables import from_table, read_table, to_table
from wakeful.config.verbs import InheritOptions
from wakeful.errors import WakefulError
from wakeful.estimates import with_error
from wakeful.growth.bridge import Bridged
from wakeful.growth.layers import written
from wakeful.hf.configuration import WakefulConfig
from wakeful.loading.load import place_of
from wakeful.loading.model import Model
from wakeful.runs.run import Run
from wakeful.training.records import Summary


def model_card(
    model: Model,
    kind: str,
    command: str,
    *,
    source: Model | None = None,
    done: Iterable[str] = (),
    figures: Iterable[str] = (),
) -> str:
    """Return the card of a model that is exported as Transformers' `kind` by this command.

    Where it was made of another model, that is the `source`, what was `done` to it is said a line
    each, and `figures` are rows of a table: the name, before and after.
    """
    source = source or model
    run = _run(source)
    lineage, origin = _lineage_of(model, source, done)
    own = kind == WakefulConfig.model_type
    trusting = ", trust_remote_code=True" if own else ""
    config = model.decoder().config
    parts = [
        _title(model.name, ["wakeful", kind], origin),
        f"{config.num_layers} layers of width {config.width}, "
        f"{model.decoder().num_parameters()['total']:,} parameters, context {config.context}; "
        + ("its code lies beside its weights.\n" if own else f"the stock architecture {kind}.\n"),
        _loading(trusting),
        "## Lineage\n",
        *(lineage or [f"Written from {model.name}; nothing was trained.\n"]),
        *(_figures(run) if run is not None else []),
        *_beside(figures),
        "## Commands\n",
        "\n".join(f"    {line}" for line in [*_commands(run), command]) + "\n",
    ]
    return "\n".join(parts)


def file_lineage(
    model: Model, *, source: Model | None = None, done: Iterable[str] = ()
) -> tuple[str, str]:
    """Return what a file without a card says of a model's lineage: a line, and the model that its
    weights come from, as the hub names it or by its bare name; "" where there is none.
    """
    said, origin = _lineage_of(model, source or model, done)
    return " ".join(" ".join(said).split()), origin if _on_hub(origin) else Path(origin).name


def _lineage_of(model: Model, source: Model, done: Iterable[str]) -> tuple[list[str], str]:
    run = _run(source)
    said = _lineage(run) if run is not None else []
    said += _made(source.name, done) if source is not model else []
    return said, _origin(run) or (source.name if source is not model else "")


def quantized_card(
    name: str,
    source: str,
    command: str,
    *,
    stock: bool,
    done: Iterable[str],
    figures: Iterable[str] = (),
) -> str:
    """Return the card of a quantized model of `source`, in a `stock` format or in ours.

    `done` says a line each how it is quantized, `figures` are as of `model_card`.
    """
    tags = ["wakeful", "quantized", *(["compressed-tensors"] if stock else [])]
    parts = [
        _title(name, tags, source),
        "Read by Transformers and vLLM where compressed-tensors is installed.\n"
        if stock
        else 'Read by `wakeful.load(".")`, and by Transformers once `wakeful.hf` is imported.\n',
        _loading(before="" if stock else "import wakeful.hf\n"),
        "## Lineage\n",
        *_made(source, done),
        *_beside(figures),
        f"## Commands\n\n    {command}\n",
    ]
    return "\n".join(parts)


def shortened_card(name: str, source: str, command: str, kind: str, layers: Sequence[int]) -> str:
    """Return the card of a model of Transformers' `kind` that has these layers of `source`."""
    parts = [
        _title(name, ["wakeful", kind], source),
        f"{len(layers)} layers; the stock architecture {kind}.\n",
        _loading(),
        "## Lineage\n",
        *_made(source, [f"its layers {written(layers)} (from 0), as they were stored",
                        "nothing was trained"]),
        f"## Commands\n\n    {command}\n",
    ]  # fmt: skip
    return "\n".join(parts)


def _title(name: str, tags: list[str], origin: str) -> str:
    """Return the metadata that the hub reads, and the heading."""
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=tags,
        base_model=origin if origin and _on_hub(origin) else None,
    )
    return f"---\n{data.to_yaml()}\n---\n\n# {name}\n"


def _loading(options: str = "", *, before: str = "") -> str:
    return (
        f"```python\n{before}from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("."{options})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("."{options})\n```\n'
    )


def _made(source: str, done: Iterable[str]) -> list[str]:
    said = "\n".join(f"- {line}" for line in done)
    return [f"Made of {source}, whose license holds here too:\n\n{said}\n"]


def _beside(rows: Iterable[str]) -> list[str]:
    table = "\n".join(rows)
    return (
        [f"## Before and after\n\n| | before | after |\n|---|---|---|\n{table}\n"] if table else []
    )


def command_of(verb: str, name: str, options: object) -> str:
    """Return the command line of a verb with the options that are not as usual."""
    # Tables hold lists where options have tuples.
    defaults = {field.name: field.default for field in dataclasses.fields(options)}  # pyright: ignore[reportArgumentType]
    usual = {
        name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()
    }
    flags = _flags(to_table(options), usual)
    return " ".join(["wakeful", verb, shlex.quote(name), *flags])


def _run(model: Model) -> Run | None:
    if model.path is None or not (model.path / "run.json").is_file():
        return None
    return Run.open(model.path)


def _origin(run: Run | None) -> str:
    """Return the model that a run's weights come from, as it was named."""
    return str((run.header.initial or {}).get("reference", "")) if run is not None else ""


def _on_hub(name: str) -> bool:
    """Tell whether a name is one of the hub's and not a folder here."""
    try:
        return "/" in name and not Path(name).is_absolute() and place_of(name).kind == "hub"
    except WakefulError:
        return False


def _lineage(run: Run) -> list[str]:
    initial = run.header.initial
    if initial is None:
        return [f"Trained from random weights, seed {run.config.train.seed}.\n"]
    layers = initial.get("layers") or []
    took = f", its layers {written(layers)} (from 0)" if layers else ""
    said = [f"Started from {initial.get('reference')}{took}. Its license holds here too.\n"]
    said += [
        f"Layers {written(range(one.first, one.last + 1))} are left out and bridged in closed form "
        f"(ReplaceMe, arXiv 2505.02819): the stream behind them was off by {one.error:.1%} of its "
        f"square before training, without a bridge by {one.plain:.1%}.\n"
        for one in from_table(tuple[Bridged, ...], initial.get("bridges", []), record="run.json")
    ]
    teacher = run.config.train.distill
    if teacher.teacher:
        said.append(
            f"Trained on {teacher.teacher}'s predictions: {teacher.alpha:g} CE + "
            f"{1 - teacher.alpha:g} KL, temperature {teacher.temperature:g}.\n"
        )
    return said


def _figures(run: Run) -> list[str]:
    """Say what it was trained on and what it reached; nothing of a run that is not finished."""
    if not (run.path / "summary.json").is_file():
        return []
    summary = run.read(Summary, "summary.json")
    data, end = summary.data, summary.validation
    error = float("nan") if end.standard_error is None else end.standard_error
    train = run.config.train
    return [
        "## Data\n",
        f"{data.text} (SHA-256 {data.corpus_sha256}), {data.train_tokens:,} training tokens, of "
        f"which {summary.tokens:,} were read in {summary.steps:,} steps of {train.batch_size} × "
        f"{train.length}.\n",
        "## Figures\n",
        f"Loss {with_error(end.loss, error)} nats a token on the {data.validation_tokens:,} "
        f"held-out tokens of that text, windows of {end.length or train.length}, one seed.\n",
    ]


def _commands(run: Run | None) -> Iterator[str]:
    """Yield the commands that made a run, as far as its folder says."""
    if run is None:
        return
    place = run.path.absolute()
    # Below an inheritance, or below the folder of a later seed of one.
    above = next((each for each in (place.parent, place.parent.parent) if _planned(each)), None)
    if above is not None:
        wishes = Run.open(above).read_json("plan.json")["wishes"]
        flags = " ".join(_flags(wishes, to_table(InheritOptions())))
        reference = read_table(above / "recipe.toml").get("reference", "")
        yield f"wakeful inherit {shlex.quote(str(reference))} {flags}".rstrip()
    else:
        yield f"wakeful train {shlex.quote(str(run.path / 'config.toml'))}"


def _planned(place: Path) -> bool:
    return (place / "plan.json").is_file() and (place / "recipe.toml").is_file()


def _flags(given: Mapping[str, Any], usual: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the flags of what is not as usual."""
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _flags(value, usual.get(name, {}), f"{prefix}{name}.")
        elif value != usual.get(name) and f"{prefix}{name}" not in ("out", "resume"):
            values = value if isinstance(value, list) else [] if value is True else [value]
            yield " ".join([f"--{prefix}{name}", *(shlex.quote(str(each)) for each in values)])
