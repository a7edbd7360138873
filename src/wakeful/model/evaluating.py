"""Context manager that switches models to evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_OUTPUTS = {"return_dict": True, "output_hidden_states": False, "_output_attentions": False}
"""Fields of a Transformers configuration for models that return their logits by name, and no other
outputs.
"""


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Switch models to evaluation and to outputs by name; restore all of their modules at the end,
    after an error too.
    """
    training = [part for model in models for part in model.modules() if part.training]
    replaced = [field for model in models for field in set_named_outputs(model)]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
        for config, name, value in replaced:
            vars(config)[name] = value


def set_named_outputs(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """Set a model's configurations so that it returns its logits by name; return the replaced
    fields as (configuration, name, value).
    """
    values = (vars(module).get("config") for module in model.modules())
    configs = {id(config): config for config in values if hasattr(config, "__dict__")}.values()
    replaced = [
        (config, name, vars(config)[name])
        for config in configs
        for name, value in _OUTPUTS.items()
        if vars(config).get(name, value) != value
    ]
    for config, name, _ in replaced:
        vars(config)[name] = _OUTPUTS[name]
    return replaced
