"""The verb export: any model that our decoder can be, as a folder for Transformers."""

import shlex
from pathlib import Path
from typing import Any

import torch

from wakeful.config.verbs import ExportOptions
from wakeful.errors import WakefulError
from wakeful.hf.gguf_out import export_gguf
from wakeful.hf.weights_out import describe, refuse_existing
from wakeful.hf.weights_out import export as write
from wakeful.loading.load import load, read_decoder
from wakeful.loading.model import AnyTokenizer, Model
from wakeful.pages.card import model_card
from wakeful.verbs.result import Source, asked, name_of


def export(
    model: Source,
    folder: str | Path,
    *,
    tokenizer: AnyTokenizer | str | Path | None = None,
    options: ExportOptions | None = None,
    **given: Any,
) -> str:
    """Write a model and its tokenizer to a folder that Transformers loads; return its model type.

        wakeful.export("runs/first", "first-for-everybody")
        wakeful.export("smollm2", "smollm2.gguf", gguf="q8_0")

    Args:
        model: a name, a path, what `wakeful.load` returned, or a module in memory.
        folder: must not exist. A name that ends in .gguf is a file for llama.cpp, which holds stock
            architectures.
        tokenizer: of a module in memory.
        options: `ExportOptions`, whose fields are keyword arguments too.
        given: those fields.

    Raises:
        WakefulError: the model cannot be read, or the folder exists or cannot be written.
    """
    wanted = asked(ExportOptions, options, given)
    dtype = getattr(torch, wanted.dtype)
    refuse_existing(Path(folder))
    if isinstance(model, str | Path):
        found = read_decoder(model, dtype=dtype, step=wanted.step)
    elif wanted.step:
        raise WakefulError(f"step = {wanted.step} is for a run, and this model is in memory")
    else:
        found = model if isinstance(model, Model) else load(model, tokenizer=tokenizer)
    if Path(folder).suffix == ".gguf":
        return export_gguf(
            found.decoder(), folder, tokenizer=found.own_tokenizer, storage=wanted.gguf,
            name=found.name,
        )  # fmt: skip
    flags = "".join(f" --{name} {value}" for name, value in _said(wanted).items())
    command = f"wakeful export {shlex.quote(name_of(model))} {shlex.quote(str(folder))}{flags}"
    card = model_card(found, describe(found.decoder().config)[0], command)
    return write(found.decoder(), folder, tokenizer=found.own_tokenizer, dtype=dtype, card=card)


def _said(options: ExportOptions) -> dict[str, object]:
    """Return the options of a folder that are not as usual."""
    given = {"dtype": options.dtype, "step": options.step}
    return {name: value for name, value in given.items() if value != getattr(ExportOptions, name)}
