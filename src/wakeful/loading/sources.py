"""Names and modules of the models that tools are given."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from wakeful.loading.model import Model
from wakeful.terminal.display import Display

Source = str | Path | Model | nn.Module
"""A model: a path, a name, one that `load` returned, or a module in memory."""


def modules_in_memory(sources: Sequence[Source]) -> list[nn.Module]:
    """Return the `nn.Module`s of the models that were given in memory rather than by name."""
    modules = [source.module if isinstance(source, Model) else source for source in sources]
    return [module for module in modules if isinstance(module, nn.Module)]


def source_name(source: Source) -> str:
    """Return the name of a model that may not be loaded yet: a path, a name or a class's name."""
    if isinstance(source, Model):
        return source.name
    return type(source).__name__ if isinstance(source, nn.Module) else str(source)


def convert_to_decoder(model: Model, show: Display) -> Model:
    """Convert a model to our decoder; show how far its logits are from the Transformers model's."""
    decoder_model = model.as_decoder_model()
    if decoder_model.agreement is not None:
        show.note(f"{model.name}: {decoder_model.agreement}")
    return decoder_model


def dtype_name(model: Model) -> str:
    """Return the type of a model's arithmetic, e.g. "float32"."""
    return str(next(model.module.parameters()).dtype).removeprefix("torch.")
