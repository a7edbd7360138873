"""The verb export: any model that our decoder can be, as a folder for Transformers."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from wakeful.config.commands import command_of
from wakeful.config.keywords import accept_options, options_from
from wakeful.config.rules import check_rules
from wakeful.errors import WakefulError
from wakeful.exporting.options import (
    COPIED_RULES,
    FILE_RULES,
    FOLDER_RULES,
    MEMORY_RULES,
    ExportOptions,
)
from wakeful.hf.checkpoint_reader import read_config
from wakeful.hf.dropping import check_order, drop_layers
from wakeful.hf.gguf_out import export_gguf
from wakeful.hf.softmax1 import softmax1_choice
from wakeful.hf.weights_out import architecture_to_write, refuse_existing
from wakeful.hf.weights_out import export_decoder as write
from wakeful.inheritance import inherit_blocks, named_layers, parse_layers
from wakeful.layer_ranges import format_layers
from wakeful.loading.card import file_lineage, model_card, shortened_card
from wakeful.loading.load import check_run_step, fetch_from_hub, load, locate_model, read_decoder
from wakeful.loading.model import AnyTokenizer
from wakeful.loading.sources import Source, convert_to_decoder, name_of
from wakeful.switches import ordinary_switches
from wakeful.terminal.display import DisplayFactory, default_display


@accept_options(ExportOptions)
@ordinary_switches()
def export(
    model: Source,
    folder: str | Path,
    *,
    tokenizer: AnyTokenizer | str | Path | None = None,
    display: DisplayFactory | None = None,
    options: ExportOptions | None = None,
    **kwargs: Any,
) -> str:
    """Write a model and its tokenizer to a folder that Transformers loads; return its model type.

        wakeful.export("runs/first", "first-for-everybody")
        wakeful.export("smollm2", "smollm2.gguf", gguf="q8_0")
        wakeful.export("openai/gpt-oss-20b", "smaller", layers=["0-11", "20-23"])

    Args:
        model: a name, a path, what `wakeful.load` returned, or a module in memory.
        folder: must not exist. A name that ends in .gguf is a file for llama.cpp, which holds stock
            architectures.
        tokenizer: in place of the model's own, or a module's; a path of one, too.
        display: shows progress; None is a bar where there is a terminal.
        options: `ExportOptions`, whose fields are keyword arguments too.

    Raises:
        WakefulError: the model cannot be read, or the folder exists or cannot be written.
    """
    options = options_from(ExportOptions, kwargs, options)
    folder = Path(folder)
    check_rules(options, *(FILE_RULES if folder.suffix == ".gguf" else FOLDER_RULES))
    refuse_existing(folder)
    command = command_of("export", options, name_of(model), str(folder))
    layers = parse_layers(options.layers)
    if layers:
        check_order(layers)
    stock = None
    if layers and folder.suffix != ".gguf":
        stock = _stock_folder(model, options.step)
    if stock is not None:
        if tokenizer is not None:
            raise WakefulError(
                "a tokenizer is given, and what stays of a folder whose layers are left out is "
                "copied: leave it out, or export the result with it"
            )
        check_rules(options, *COPIED_RULES)
        config = read_config(stock)
        card = shortened_card(
            folder.name, name_of(model), command, config.model_type, layers,
            softmax1=softmax1_choice(config) is not None,
        )  # fmt: skip
        return drop_layers(stock, layers, folder, card=card)
    if isinstance(model, str | Path):
        # A folder's tensors are cast as they are written, where what does not fit is refused.
        stored = torch.float32 if folder.suffix == ".gguf" else "auto"
        loaded = read_decoder(model, tokenizer=tokenizer, dtype=stored, step=options.step)
    else:
        check_rules(options, *MEMORY_RULES)
        loaded = load(model, tokenizer=tokenizer)
    if loaded.is_quantized:
        raise WakefulError(
            f"{loaded.name} is quantized: export the model it was made from, or save this one by "
            "save_model"
        )
    with (display or default_display)("export") as show:
        loaded = original = convert_to_decoder(loaded, show)
    if layers:
        of = loaded.decoder().config.num_layers
        loaded = dataclasses.replace(
            loaded, module=inherit_blocks(loaded.decoder(), named_layers(layers, of=of))
        )
    done = [f"its layers {format_layers(layers)} (from 0)"] if layers else []
    if loaded.agreement is not None:
        done.append(f"read as wakeful's decoder: {loaded.agreement}")
    if folder.suffix == ".gguf":
        lineage, origin = file_lineage(loaded, source=original, done=done)
        return export_gguf(
            loaded.decoder(), folder, tokenizer=loaded.own_tokenizer,
            storage="f16" if options.gguf == "auto" else options.gguf, name=loaded.name,
            lineage=lineage, origin=origin,
        )  # fmt: skip
    kind = architecture_to_write(loaded.decoder().config, loaded.own_tokenizer)[0]
    card = model_card(loaded, kind, command, source=original, done=done)
    dtype = loaded.written_in if options.dtype == "auto" else getattr(torch, options.dtype)
    return write(
        loaded.decoder(), folder, tokenizer=loaded.own_tokenizer, dtype=dtype, card=card,
        types=loaded.types if options.dtype == "auto" else None,
    )  # fmt: skip


def _stock_folder(model: Source, step: int) -> Path | None:
    """Return the folder of Transformers' files that a model is read from, fetched from the hub
    where that is its place; None for runs, our own exports and models in memory.

    Raises:
        WakefulError: a `step` is asked for, which runs alone have.
    """
    if not isinstance(model, str | Path):
        return None
    location = locate_model(model)
    check_run_step(location, step)
    if location.kind == "hub":
        return fetch_from_hub(location.name)
    return location.path if location.kind == "folder" else None
