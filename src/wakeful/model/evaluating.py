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
    """Switch models to evaluation mode, and those of Transformers to return their logits by name,
    inside the context; restore every module and configuration at the end, after an error too.
    """
    in_training = [part for model in models for part in model.modules() if part.training]
    replaced = [field for model in models for field in set_named_outputs(model)]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        # Each module as it was: parts of a model may differ, which `train()` would not restore.
        for part in in_training:
            part.training = True
        for config, name, value in replaced:
            vars(config)[name] = value


def set_named_outputs(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """Set the Transformers configurations in a model so that it returns its logits by name, and no
    other outputs; return what was replaced as (configuration, field's name, old value).
    """
    values = (vars(module).get("config") for module in model.modules())
    # Modules share a configuration: each once.
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
