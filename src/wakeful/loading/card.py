"""The model card of an export (README.md): lineage, data, figures, and the commands behind it."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub import ModelCardData

from wakeful.config.schema import BridgeConfig
from wakeful.config.tables import from_table, read_table
from wakeful.errors import WakefulError
from wakeful.estimates import INTERVAL, format_interval
from wakeful.hf.configuration import WakefulConfig
from wakeful.layer_ranges import format_layers
from wakeful.loading.load import locate_model
from wakeful.loading.model import Model
from wakeful.probes.running import as_decoder
from wakeful.reports.lineage import describe_bridge, describe_objective
from wakeful.runs.records import (
    BridgeGap,
    RunSummary,
    StepRow,
    ValidationLoss,
    ValidationRow,
    logged_rows,
)
from wakeful.runs.run import Run, run_at
from wakeful.terminal.plain_text import escape_controls, escape_markdown
from wakeful.variants.implementations import SOFTMAX1, attention_implementation


def model_card(
    model: Model,
    kind: str,
    command: str,
    *,
    source: Model | None = None,
    done: Iterable[str] = (),
    figures: Iterable[tuple[str, str, str]] = (),
) -> str:
    """Return the model card (README.md) of a model that `command` exports as the architecture
    `kind`, a Transformers `model_type`.

    For a model derived from another (cured, converted), `source` is that one, `done` lists the
    steps, one per line, and `figures` are rows of a table: name, before and after.
    """
    source = source or model
    run = run_at(source.path)
    lineage, origin = _describe_lineage(model, source, done)
    lineage = lineage or [f"Written from {escape_markdown(model.name)}; nothing was trained.\n"]
    if run is not None:
        lineage += _training_lines(run, model, source)
    has_own_code = kind == WakefulConfig.model_type
    code = f"the stock architecture {escape_markdown(kind)}"
    if has_own_code:
        code = "its code lies beside its weights"
    decoder, module = as_decoder(model.module), cast(Any, model.module)
    width = decoder.config.width if decoder else module.config.get_text_config().hidden_size
    num_parameters = sum(parameter.numel() for parameter in model.module.parameters())
    about = (
        f"{len(model.blocks)} layers of width {width}, {num_parameters:,} parameters, context "
        f"{model.context}; {code}."
    )
    return _card(
        model.name, [kind], origin, about, [*lineage, *_format_figures(figures)],
        [*_past_commands(run), command], trusted=has_own_code,
        softmax1=decoder is None and attention_implementation(module) == SOFTMAX1,
    )  # fmt: skip


def file_lineage(model: Model, *, done: Iterable[str] = ()) -> tuple[str, str]:
    """Return a model's lineage for a GGUF file, which has no model card: one line of text, and the
    name of the model that its weights come from (its name on the hub if it is there, else the last
    part of its path; "" for none).
    """
    lines, origin = _describe_lineage(model, model, done)
    one_line = " ".join(" ".join(lines).split())
    return one_line, origin if _on_hub(origin) else Path(origin).name


def _describe_lineage(model: Model, source: Model, done: Iterable[str]) -> tuple[list[str], str]:
    """Return paragraphs on where a model comes from, and the name of its original model ("" for
    none).

    `source` is the model that it was derived from by the steps `done`, or the model itself.
    """
    run = run_at(source.path)
    is_derived = source is not model
    lines = _lineage_lines(run) if run is not None else []
    if is_derived or done:
        lines += _format_origin(source.name, done)
    return lines, _initial_model(run) or (source.name if is_derived else "")


def quantized_card(
    name: str,
    source: str,
    command: str,
    *,
    done: Iterable[str],
    figures: Iterable[tuple[str, str, str]] = (),
) -> str:
    """Return the model card of a model that was quantized from `source` and saved as
    compressed-tensors.

    `done` lists the steps of quantization, one per line; `figures` are rows of a table: name,
    before and after.
    """
    about = "Read by Transformers and vLLM where compressed-tensors is installed."
    sections = [*_format_origin(source, done), *_format_figures(figures)]
    return _card(name, ["quantized", "compressed-tensors"], source, about, sections, [command])


def _card(
    name: str, tags: Sequence[str], origin: str, about: str, lineage: Sequence[str],
    commands: Sequence[str], *, trusted: bool = False, softmax1: bool = False,
) -> str:  # fmt: skip
    """Return a model card: metadata for the hub, a heading, code that loads the model, lineage and
    commands.

    With `trusted` the code passes `trust_remote_code=True`; with `softmax1` it imports
    `wakeful.hf`, without which Transformers does not know the model's attention.
    """
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["wakeful", *tags],
        base_model=origin if origin and _on_hub(origin) else None,
    )
    options = ", trust_remote_code=True" if trusted else ""
    first_import = ""
    if softmax1:
        first_import = "import wakeful.hf  # has the model's attention, softmax-1\n"
    return "\n".join([
        f"---\n{data.to_yaml()}\n---\n\n# {escape_markdown(name)}\n",
        f"{about}\n",
        f"```python\n{first_import}"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("."{options})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("."{options})\n```\n',
        "## Lineage\n",
        *lineage,
        "## Commands\n",
        "".join(f"    {escape_controls(line)}\n" for line in commands),
    ])  # fmt: skip


def _format_origin(source: str, done: Iterable[str]) -> list[str]:
    """Return a paragraph that names the source model and lists the steps `done` to it."""
    steps = "\n".join(f"- {escape_markdown(line)}" for line in done)
    return [f"Made from {escape_markdown(source)}, whose license holds here too:\n\n{steps}\n"]


def _format_figures(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a section with a table of figures, each with its name and its values before and after;
    nothing without rows.
    """
    table = "\n".join(f"| {' | '.join(map(escape_markdown, row))} |" for row in rows)
    header = "## Before and after\n\n| | before | after |\n|---|---|---|\n"
    return [f"{header}{table}\n"] if table else []


def _initial_model(run: Run | None) -> str:
    """Return the name of the model that a run's first weights come from, as the user gave it; ""
    for random weights or no run.
    """
    initial = (run.header.initial or {}) if run is not None else {}
    return "" if initial.get("random") is True else str(initial.get("reference", ""))


def _on_hub(name: str) -> bool:
    """Tell whether a model's name has the form of a name on the Hugging Face hub and is no local
    path.
    """
    try:
        return "/" in name and not Path(name).is_absolute() and locate_model(name).kind == "hub"
    except WakefulError:
        return False


def _lineage_lines(run: Run) -> list[str]:
    """Return sentences on a run's start (random or inherited) and its objective."""
    initial, train = run.header.initial, run.config.train
    distillation = train.distill
    lines = [f"Trained from random weights, seed {train.seed}.\n"]
    if initial is not None:
        lines = [f"{line}\n" for line in _inheritance_lines(run, initial)]
    if distillation.teacher:
        lines.append(
            f"Trained on {escape_markdown(distillation.teacher)}'s predictions: "
            f"{describe_objective(distillation, 'teacher', 'student')}.\n"
        )
    elif initial is not None:
        lines.append("Trained on text by cross-entropy.\n")
    return lines


def _inheritance_lines(run: Run, initial: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on a run that started from a reference model's weights, or as the baseline of
    such runs: which layers, under which license, and the bridges between them.

    `initial` is the record of that in the run's header.
    """
    reference = escape_markdown(initial.get("reference"))
    arm = escape_markdown(initial.get("arm", ""))
    layers = initial.get("layers") or []
    if "baseline" in initial:
        terms = "The license of that model holds here too."
        if initial.get("random") is True:
            terms = "No weight comes from that model."
        description = escape_markdown(initial["baseline"])
        yield f"The baseline {arm} beside the heirs of {reference}: {description}. {terms}"
    else:
        which = f", its layers {format_layers(layers)} (from 0)" if layers else ""
        yield f"Started from {reference}{which}. Its license holds here too."
    folder = _inheritance_folder(run)
    recipe = {} if folder is None else read_table(folder / "recipe.toml")
    bridge = from_table(BridgeConfig, recipe.get("bridge", {}), record="recipe.toml")
    bridges = from_table(tuple[BridgeGap, ...], initial.get("bridges", []), record="run.json")
    yield from (describe_bridge(entry, bridge if recipe else None) for entry in bridges)


def _training_lines(run: Run, model: Model, source: Model) -> Iterator[str]:
    """Yield the card's lines on the training data and the validation loss of a finished run; none
    for an unfinished one.

    `source` is the run's model, and `model` the card's: the same, or one derived from it. A loss is
    then that of the source, and is left out where `model` has fewer layers.
    """
    if not (run.path / "summary.json").is_file():
        return
    summary, train, step = run.read(RunSummary, "summary.json"), run.config.train, source.step
    data, tokens, steps = summary.data, summary.tokens, summary.steps
    validation: ValidationLoss | None = summary.validation
    offset = (run.header.initial or {}).get("offset")
    earlier_steps = offset if isinstance(offset, int) else 0  # of the runs that it continues
    tokens_per_step = train.batch_size * train.length
    # The summary is of the last step; 0 stands for the newest checkpoint.
    if step not in (0, steps):
        logged = {row.step: row.tokens for row in logged_rows(run, StepRow)}
        tokens, steps = logged.get(step, step * tokens_per_step), step
        validation = {row.step: row for row in logged_rows(run, ValidationRow)}.get(step)
    yield "## Data\n"
    yield (
        f"{escape_markdown(data.text)} (SHA-256 {escape_markdown(data.corpus_sha256)}), "
        f"{data.trained} training tokens, of which "
        f"{earlier_steps * tokens_per_step + tokens:,} were read in "
        f"{earlier_steps + steps:,} steps of {train.batch_size} × {train.length}.\n"
    )
    if validation and model.decoder().config.num_layers >= source.decoder().config.num_layers:
        loss = format_interval(
            validation.loss, validation.standard_error, summary.validation.num_windows
        )
        remark = "" if model is source else " It was measured before these steps."
        yield "## Figures\n"
        yield (
            f"Loss {loss} nats per token ({INTERVAL} over windows) on the "
            f"{data.validation_tokens:,} held-out tokens of that text, windows of "
            f"{summary.validation.length or train.length}, one seed.{remark}\n"
        )


def _past_commands(run: Run | None) -> Iterator[str]:
    """Yield the commands that produced a run, as its folder records them."""
    if run is None:
        return
    inheritance = _inheritance_folder(run)
    if inheritance is not None:
        yield str(Run.open(inheritance).read_json("plan.json")["command"])
    else:
        yield f"wakeful train {shlex.quote(str(run.path / 'config.toml'))}"


def _inheritance_folder(run: Run) -> Path | None:
    """Return the folder of the inheritance that a run belongs to; None for another run.

    It is the run's parent folder or, for a run of a later seed, the parent's parent.
    """
    path, files = run.path.absolute(), ("plan.json", "recipe.toml")
    for folder in (path.parent, path.parent.parent):
        if all((folder / file).is_file() for file in files):
            return folder
    return None
