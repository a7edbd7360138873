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
    """Switch models to evaluation mode inside the context.

    Models of Transformers also return their logits by name there, and no other outputs. At the end,
    after an error too, every module and configuration is as it was before.
    """
    in_training = [module for model in models for module in model.modules() if module.training]
    replaced_fields = [field for model in models for field in set_named_outputs(model)]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        # One by one, as `train()` would set all of a model's modules to the same mode.
        for module in in_training:
            module.training = True
        for config, name, value in replaced_fields:
            vars(config)[name] = value


def set_named_outputs(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """Set the Transformers configurations in a model so that it returns its logits by name, and no
    other outputs. Return (configuration, field's name, old value) for each field that was changed.
    """
    attributes = [vars(module).get("config") for module in model.modules()]
    # By their ids, as modules share a configuration and it should be changed once. A module without
    # one has None here.
    configs = {id(config): config for config in attributes if hasattr(config, "__dict__")}
    replaced: list[tuple[Any, str, Any]] = []
    for config in configs.values():
        fields = vars(config)
        for name, value in _OUTPUTS.items():
            if name in fields and fields[name] != value:
                replaced.append((config, name, fields[name]))
                fields[name] = value
    return replaced
