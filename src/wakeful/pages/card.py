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
from wakeful.growth.baselines import BASELINES
from wakeful.growth.bridge import Bridged
from wakeful.growth.layers import written
from wakeful.growth.recipe import Recipe
from wakeful.hf.configuration import WakefulConfig
from wakeful.loading.load import place_of
from wakeful.loading.model import Model
from wakeful.pages.lineage import adapters, bridged, left_out, narrowed, objective, predictions
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
    initial, train = run.header.initial, run.config.train
    teacher, alone = train.distill, adapters(train.lora)
    said = [f"Trained from random weights, seed {train.seed}.\n"]
    if initial is not None:
        said = [f"{line}\n" for line in _inherited(run, initial)]
    if teacher.teacher:
        said.append(
            f"Trained on {teacher.teacher}'s {predictions(teacher)}: "
            f"{objective(teacher, 'teacher', 'student')}{alone}.\n"
        )
    elif initial is not None or alone:
        said.append(f"Trained on text by cross-entropy{alone}.\n")
    return said


def _inherited(run: Run, initial: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was taken of a reference and what became of the rest, before training."""
    reference, layers = initial.get("reference"), initial.get("layers") or []
    arm, place = str(initial.get("arm", "")), _inheritance(run)
    baseline = BASELINES.get(arm)
    if baseline is not None:
        yield (
            f"The baseline {arm} beside the heirs of {reference}: {baseline.summary}. The license "
            "of that model holds here too."
        )
    else:
        took = f", its layers {written(layers)} (from 0)" if layers else ""
        yield f"Started from {reference}{took}. Its license holds here too."
    recipe = None
    if place is not None:
        recipe = from_table(Recipe, read_table(place / "recipe.toml"), record="recipe.toml")
    if recipe is not None and arm.startswith("heir"):
        made = narrowed(recipe.width, recipe.bridge), left_out(recipe.drops_to(len(layers)))
        yield from filter(None, made)
        if recipe.drops == 1 and initial.get("offset"):
            yield f"It grew by {recipe.grow} layers a round, with training in between."
    bridges = from_table(tuple[Bridged, ...], initial.get("bridges", []), record="run.json")
    yield from (bridged(one, recipe and recipe.bridge) for one in bridges)


def _figures(run: Run) -> list[str]:
    """Say what it was trained on and what it reached; nothing of a run that is not finished."""
    if not (run.path / "summary.json").is_file():
        return []
    summary = run.read(Summary, "summary.json")
    data, end = summary.data, summary.validation
    error = float("nan") if end.standard_error is None else end.standard_error
    train, offset = run.config.train, (run.header.initial or {}).get("offset")
    before = offset if isinstance(offset, int) else 0  # steps of the runs that it goes on from
    tokens = before * train.batch_size * train.length + summary.tokens
    return [
        "## Data\n",
        f"{data.text} (SHA-256 {data.corpus_sha256}), {data.train_tokens:,} training tokens, of "
        f"which {tokens:,} were read in {before + summary.steps:,} steps of {train.batch_size} × "
        f"{train.length}.\n",
        "## Figures\n",
        f"Loss {with_error(end.loss, error)} nats a token on the {data.validation_tokens:,} "
        f"held-out tokens of that text, windows of {end.length or train.length}, one seed.\n",
    ]


def _commands(run: Run | None) -> Iterator[str]:
    """Yield the commands that made a run, as far as its folder says."""
    if run is None:
        return
    above = _inheritance(run)
    if above is not None:
        wishes = Run.open(above).read_json("plan.json")["wishes"]
        flags = " ".join(_flags(wishes, to_table(InheritOptions())))
        reference = read_table(above / "recipe.toml").get("reference", "")
        yield f"wakeful inherit {shlex.quote(str(reference))} {flags}".rstrip()
    else:
        yield f"wakeful train {shlex.quote(str(run.path / 'config.toml'))}"


def _inheritance(run: Run) -> Path | None:
    """Return the folder of the inheritance that a run is of; None where it is of none."""
    place = run.path.absolute()
    # Below an inheritance, or below the folder of a later seed of one.
    return next((each for each in (place.parent, place.parent.parent) if _planned(each)), None)


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
