"""The model card of an export (README.md): lineage, figures, and the command behind it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub import ModelCardData

from wakeful.config.tables import from_table
from wakeful.errors import WakefulError
from wakeful.hf.configuration import WakefulConfig
from wakeful.layer_ranges import format_layers
from wakeful.loading.load import locate_model
from wakeful.loading.model import Model
from wakeful.probes.running import as_decoder
from wakeful.reports.lineage import describe_bridge, describe_objective
from wakeful.runs.records import BridgeGap, DataFacts
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
    lineage, origin = _describe_lineage(model, source, done)
    lineage = lineage or [f"Written from {escape_markdown(model.name)}; nothing was trained.\n"]
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
        model.name, [kind], origin, about, [*lineage, *_format_figures(figures)], command,
        trusted=has_own_code,
        softmax1=decoder is None and attention_implementation(module) == SOFTMAX1,
    )  # fmt: skip


def file_lineage(model: Model, *, done: Iterable[str] = ()) -> tuple[str, str]:
    """Return a model's lineage for a GGUF file, which has no model card: one line of text that
    includes the steps `done`, and the name of the model that its weights come from.

    That is its name on the hub, or else the last part of its path; "" for no such model.
    """
    lines, origin = _describe_lineage(model, model, done)
    one_line = " ".join(" ".join(lines).split())
    return one_line, origin if _on_hub(origin) else Path(origin).name


def _describe_lineage(model: Model, source: Model, done: Iterable[str]) -> tuple[list[str], str]:
    """Return paragraphs on where a model comes from, and the name of its original model ("" for
    none): the one whose weights a training run began with, else the one that it was derived from.

    `source` is the model that it was derived from by the steps `done`, or the model itself.
    """
    run = run_at(source.path)  # None if the source is not a run
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
    rotates_inputs: bool = False,
) -> str:
    """Return the model card of a model that was quantized from `source` and saved as
    compressed-tensors.

    `done` lists the steps of quantization, one per line; `figures` are rows of a table: name,
    before and after. `rotates_inputs` says that the model rotates inputs of layers as it runs.
    """
    about = "Read by Transformers and vLLM where compressed-tensors is installed."
    if rotates_inputs:
        about = (
            "Inputs of layers are rotated while the model runs, as `transform_config` says. vLLM "
            "and wakeful do so; Transformers does not, and refuses the folder."
        )
    sections = [*_format_origin(source, done), *_format_figures(figures)]
    tags = ["quantized", "compressed-tensors"]
    return _card(name, tags, source, about, sections, command, by_wakeful=rotates_inputs)


def _card(
    name: str, tags: Sequence[str], origin: str, about: str, lineage: Sequence[str],
    command: str, *, trusted: bool = False, softmax1: bool = False, by_wakeful: bool = False,
) -> str:  # fmt: skip
    """Return a model card: metadata for the hub, a heading, code that loads the model, lineage and
    the command.

    With `trusted` the code passes `trust_remote_code=True`; with `softmax1` it imports
    `wakeful.hf`, without which Transformers does not know the model's attention; with `by_wakeful`
    it calls `wakeful.load`, because Transformers cannot read the model.
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
    code = (
        f"{first_import}"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("."{options})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("."{options})\n'
    )
    if by_wakeful:
        code = 'import wakeful\n\nmodel = wakeful.load(".")\n'
    return "\n".join([
        f"---\n{data.to_yaml()}\n---\n\n# {escape_markdown(name)}\n",
        f"{about}\n",
        f"```python\n{code}```\n",
        "## Lineage\n",
        *lineage,
        "## Command\n",
        f"    {escape_controls(command)}\n",
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
    """Return sentences for a model card on a run's initial weights (random or inherited), its
    objective and its text, each ended by a newline.
    """
    initial, train = run.header.initial, run.config.train
    distillation = train.distill
    lines = [f"Trained from random weights, seed {train.seed}.\n"]
    if initial is not None:
        lines = [f"{line}\n" for line in _inheritance_lines(initial)]
    if distillation.teacher:
        lines.append(
            f"Trained on {escape_markdown(distillation.teacher)}'s predictions: "
            f"{describe_objective(distillation, 'teacher', 'student')}.\n"
        )
    elif initial is not None:
        lines.append("Trained on text by cross-entropy.\n")
    data = run.read(DataFacts, "data.json")
    digest = escape_markdown(data.corpus_sha256)
    lines.append(f"Its text: {escape_markdown(data.text)} (SHA-256 {digest}).\n")
    return lines


def _inheritance_lines(initial: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on a run whose model inherits a reference model's weights, or is a baseline
    for such heirs: which layers it has, under which license, and the bridges over dropped layers.

    `initial` describes the initial weights in the run's header.
    """
    reference = escape_markdown(initial.get("reference"))
    baseline_name = escape_markdown(initial.get("arm", ""))
    layers = initial.get("layers") or []
    if "baseline" in initial:
        license_note = "The license of that model holds here too."
        if initial.get("random") is True:
            license_note = "No weight comes from that model."
        description = escape_markdown(initial["baseline"])
        yield (
            f"The baseline {baseline_name} beside the heirs of {reference}: {description}. "
            f"{license_note}"
        )
    else:
        which = f", its layers {format_layers(layers)} (from 0)" if layers else ""
        yield f"Started from {reference}{which}. Its license holds here too."
    bridges = from_table(tuple[BridgeGap, ...], initial.get("bridges", []), record="run.json")
    yield from (describe_bridge(entry, None) for entry in bridges)
