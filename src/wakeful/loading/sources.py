"""The models that verbs are asked about."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from wakeful.loading.model import Model
from wakeful.terminal.display import Display

Source = str | Path | Model | nn.Module
"""A model: a path, a name, one that `load` returned, or a module in memory."""


def in_memory(sources: Sequence[Source]) -> list[nn.Module]:
    """Return the modules of a user's own among models, which may be in training."""
    modules = [source.module if isinstance(source, Model) else source for source in sources]
    return [module for module in modules if isinstance(module, nn.Module)]


def name_of(source: Source) -> str:
    """Return what a model is called before it is loaded."""
    if isinstance(source, Model):
        return source.name
    return type(source).__name__ if isinstance(source, nn.Module) else str(source)


def as_ours(model: Model, show: Display) -> Model:
    """Return a model as our decoder, and say how far that is from Transformers' own."""
    ours = model.converted()
    if ours.agreement is not None:
        show.note(f"{model.name}: {ours.agreement}")
    return ours


def dtype_of(model: Model) -> str:
    """Return the arithmetic a model computes in, e.g. "float32"."""
    return str(next(model.module.parameters()).dtype).removeprefix("torch.")
