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
from wakeful.runs.records import BridgeGap, RunSummary, StepRow, ValidationLoss, ValidationRow, rows
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
    """Return the card of a model that is exported as Transformers' `kind` by this command.

    For a model derived from another, that is the `source`, `done` lists the steps, one per line,
    and `figures` are rows of a table: name, before and after.
    """
    source = source or model
    run = run_at(source.path)
    lineage, origin = _lineage_of(model, source, done)
    own = kind == WakefulConfig.model_type
    decoder, module = as_decoder(model.module), cast(Any, model.module)
    width = decoder.config.width if decoder else module.config.get_text_config().hidden_size
    total = sum(parameter.numel() for parameter in model.module.parameters())
    code = (
        "its code lies beside its weights"
        if own
        else f"the stock architecture {escape_markdown(kind)}"
    )
    softmax1 = decoder is None and attention_implementation(module) == SOFTMAX1
    return _card(
        model.name, [kind], origin,
        f"{len(model.blocks)} layers of width {width}, {total:,} parameters, context "
        f"{model.context}; {code}.",
        [
            *(lineage or [f"Written from {escape_markdown(model.name)}; nothing was trained.\n"]),
            *(_training_lines(run, model, source) if run is not None else []),
            *_format_figures(figures),
        ],
        [*_past_commands(run), command], trusted=own, softmax1=softmax1,
    )  # fmt: skip


def file_lineage(model: Model, *, done: Iterable[str] = ()) -> tuple[str, str]:
    """Return a model's lineage for a file without a card: one line, and the name of the model that
    its weights come from (the hub's where it is there, else the bare name; "" for none).
    """
    lines, origin = _lineage_of(model, model, done)
    return " ".join(" ".join(lines).split()), origin if _on_hub(origin) else Path(origin).name


def _lineage_of(model: Model, source: Model, done: Iterable[str]) -> tuple[list[str], str]:
    run = run_at(source.path)
    lines = _lineage_lines(run) if run is not None else []
    lines += _format_origin(source.name, done) if source is not model or done else []
    return lines, _origin(run) or (source.name if source is not model else "")


def quantized_card(
    name: str,
    source: str,
    command: str,
    *,
    done: Iterable[str],
    figures: Iterable[tuple[str, str, str]] = (),
) -> str:
    """Return the card of a quantized model of `source`, saved as compressed-tensors.

    `done` lists the steps of quantization, one per line; `figures` are as in `model_card`.
    """
    about = "Read by Transformers and vLLM where compressed-tensors is installed."
    sections = [*_format_origin(source, done), *_format_figures(figures)]
    return _card(name, ["quantized", "compressed-tensors"], source, about, sections, [command])


def _card(
    name: str, tags: Sequence[str], origin: str, about: str, lineage: Sequence[str],
    commands: Sequence[str], *, trusted: bool = False, softmax1: bool = False,
) -> str:  # fmt: skip
    """Return a card: metadata for the hub, a heading, code that loads the model, lineage, commands.

    With `trusted` that code passes `trust_remote_code=True`; with `softmax1` it imports
    `wakeful.hf`, without which Transformers does not know the model's attention.
    """
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["wakeful", *tags],
        base_model=origin if origin and _on_hub(origin) else None,
    )
    options = ", trust_remote_code=True" * trusted
    return "\n".join([
        f"---\n{data.to_yaml()}\n---\n\n# {escape_markdown(name)}\n",
        f"{about}\n",
        "```python\n" + "import wakeful.hf  # has the model's attention, softmax-1\n" * softmax1 +
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("."{options})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("."{options})\n```\n',
        "## Lineage\n",
        *lineage,
        "## Commands\n",
        "".join(f"    {escape_controls(line)}\n" for line in commands),
    ])  # fmt: skip


def _format_origin(source: str, done: Iterable[str]) -> list[str]:
    lines_made = "\n".join(f"- {escape_markdown(line)}" for line in done)
    return [f"Made of {escape_markdown(source)}, whose license holds here too:\n\n{lines_made}\n"]


def _format_figures(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    table = "\n".join(f"| {' | '.join(map(escape_markdown, row))} |" for row in rows)
    return (
        [f"## Before and after\n\n| | before | after |\n|---|---|---|\n{table}\n"] if table else []
    )


def _origin(run: Run | None) -> str:
    """Return the name of the model that a run's weights come from, as the user gave it."""
    initial = (run.header.initial or {}) if run is not None else {}
    return "" if initial.get("random") is True else str(initial.get("reference", ""))


def _on_hub(name: str) -> bool:
    """Return True where a name is one of the hub's and not of a local folder."""
    try:
        return "/" in name and not Path(name).is_absolute() and locate_model(name).kind == "hub"
    except WakefulError:
        return False


def _lineage_lines(run: Run) -> list[str]:
    """Return sentences on a run's start (random or inherited) and its objective."""
    initial, train = run.header.initial, run.config.train
    teacher = train.distill
    lines = [f"Trained from random weights, seed {train.seed}.\n"]
    if initial is not None:
        lines = [f"{line}\n" for line in _inheritance_lines(run, initial)]
    if teacher.teacher:
        lines.append(
            f"Trained on {escape_markdown(teacher.teacher)}'s predictions: "
            f"{describe_objective(teacher, 'teacher', 'student')}.\n"
        )
    elif initial is not None:
        lines.append("Trained on text by cross-entropy.\n")
    return lines


def _inheritance_lines(run: Run, initial: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on what an heir takes from its reference, and its bridges."""
    reference, layers = escape_markdown(initial.get("reference")), initial.get("layers") or []
    arm, folder = escape_markdown(initial.get("arm", "")), _inheritance_folder(run)
    if "baseline" in initial:
        terms = "The license of that model holds here too."
        if initial.get("random") is True:
            terms = "No weight comes from that model."
        start = escape_markdown(initial["baseline"])
        yield f"The baseline {arm} beside the heirs of {reference}: {start}. {terms}"
    else:
        took = f", its layers {format_layers(layers)} (from 0)" if layers else ""
        yield f"Started from {reference}{took}. Its license holds here too."
    recipe = {} if folder is None else read_table(folder / "recipe.toml")
    bridge = from_table(BridgeConfig, recipe.get("bridge", {}), record="recipe.toml")
    bridges = from_table(tuple[BridgeGap, ...], initial.get("bridges", []), record="run.json")
    yield from (describe_bridge(entry, bridge if recipe else None) for entry in bridges)


def _training_lines(run: Run, model: Model, source: Model) -> Iterator[str]:
    """Yield the card's lines on the training data and the validation loss of a finished run.

    `source` is the run's model, `model` the one that the card is for: unless it is the source, the
    loss was measured before it was changed; with fewer layers than the source it has no loss.
    """
    if not (run.path / "summary.json").is_file():
        return
    summary, train, step = run.read(RunSummary, "summary.json"), run.config.train, source.step
    data, tokens, steps = summary.data, summary.tokens, summary.steps
    validation: ValidationLoss | None = summary.validation
    offset = (run.header.initial or {}).get("offset")
    earlier_steps = offset if isinstance(offset, int) else 0  # of the runs that it continues
    tokens_per_step = train.batch_size * train.length
    if step not in (0, steps):  # 0 is the newest
        logged = {row.step: row.tokens for row in rows(run, StepRow)}
        tokens, steps = logged.get(step, step * tokens_per_step), step
        validation = {row.step: row for row in rows(run, ValidationRow)}.get(step)
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
        remark = "" if model is source else " It was measured before that was done to it."
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
    """Return the folder of the inheritance that a run belongs to; None for another run."""
    parent, files = run.path.absolute(), ("plan.json", "recipe.toml")
    # Below an inheritance, or below the folder of a later seed of one.
    for folder in (parent.parent, parent.parent.parent):
        if all((folder / file).is_file() for file in files):
            return folder
    return None
