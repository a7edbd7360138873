"""Export of a model that our decoder can represent, to a folder for Transformers or a GGUF file."""

from pathlib import Path
from typing import Any

import torch

from wakeful.config.commands import format_command_line
from wakeful.config.keywords import accept_options, options_from
from wakeful.config.rules import check_rules
from wakeful.errors import WakefulError
from wakeful.exporting.options import FILE_RULES, FOLDER_RULES, MEMORY_RULES, ExportOptions
from wakeful.hf.gguf_out import export_gguf
from wakeful.hf.weights_out import architecture_to_write, refuse_existing
from wakeful.hf.weights_out import export_decoder as write
from wakeful.loading.card import file_lineage, model_card
from wakeful.loading.load import load, read_decoder
from wakeful.loading.model import AnyTokenizer
from wakeful.loading.sources import Source, convert_to_decoder, source_name
from wakeful.switches import default_torch_state
from wakeful.terminal.display import DisplayFactory, default_display


@accept_options(ExportOptions)
@default_torch_state()
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

    Args:
        model: a name, a path, what `wakeful.load` returned, or a module in memory.
        folder: must not exist. A name that ends in .gguf is a file for llama.cpp, which holds stock
            architectures.
        tokenizer: replaces the model's own; required for a module; may be a path.
        display: shows progress; None is a bar where there is a terminal.
        options: `ExportOptions`, whose fields are keyword arguments too.

    Raises:
        WakefulError: the model cannot be read, or the folder exists or cannot be written.
    """
    options = options_from(ExportOptions, kwargs, options)
    folder = Path(folder)
    check_rules(options, *(FILE_RULES if folder.suffix == ".gguf" else FOLDER_RULES))
    refuse_existing(folder)
    command = format_command_line("export", options, source_name(model), str(folder))
    if isinstance(model, str | Path):
        # For a folder, tensors are cast as they are written, which checks that they fit the type.
        read_dtype = torch.float32 if folder.suffix == ".gguf" else "auto"
        loaded = read_decoder(model, tokenizer=tokenizer, dtype=read_dtype, step=options.step)
    else:
        check_rules(options, *MEMORY_RULES)
        loaded = load(model, tokenizer=tokenizer)
    if loaded.is_quantized:
        raise WakefulError(
            f"{loaded.name} is quantized: export the model it was made from, or save this one by "
            "save_model"
        )
    with (display or default_display)("export") as show:
        loaded = convert_to_decoder(loaded, show)
    done: list[str] = []
    if loaded.agreement is not None:
        done.append(f"read as wakeful's decoder: {loaded.agreement}")
    if folder.suffix == ".gguf":
        lineage, origin = file_lineage(loaded, done=done)
        return export_gguf(
            loaded.decoder(), folder, tokenizer=loaded.wakeful_tokenizer,
            storage="f16" if options.gguf == "auto" else options.gguf, name=loaded.name,
            lineage=lineage, origin=origin,
        )  # fmt: skip
    model_type = architecture_to_write(loaded.decoder().config, loaded.wakeful_tokenizer)[0]
    card = model_card(loaded, model_type, command, done=done)
    dtype = loaded.export_dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    return write(
        loaded.decoder(), folder, tokenizer=loaded.wakeful_tokenizer, dtype=dtype, card=card,
        types=loaded.types if options.dtype == "auto" else None,
    )  # fmt: skip
