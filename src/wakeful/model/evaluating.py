"""Models switched to evaluation for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_OUTPUTS = {"return_dict": True, "output_hidden_states": False, "_output_attentions": False}
"""What a configuration of Transformers must say for a model to put out logits by name, and no more
than is asked for.
"""


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Switch models to evaluation and to outputs by name, and each of their modules back to what it
    was, after an error too.
    """
    training = [part for model in models for part in model.modules() if part.training]
    before = [each for model in models for each in name_outputs(model)]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
        for config, name, value in before:
            vars(config)[name] = value


def name_outputs(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """Let a model put out its logits by name, whatever its configuration says; return the fields
    that said something else, as configuration, name and value.
    """
    parts = (vars(part).get("config") for part in model.modules())
    configs = {id(each): each for each in parts if hasattr(each, "__dict__")}.values()
    before = [
        (config, name, vars(config)[name])
        for config in configs
        for name, value in _OUTPUTS.items()
        if vars(config).get(name, value) != value
    ]
    for config, name, _ in before:
        vars(config)[name] = _OUTPUTS[name]
    return before
