"""Which parameters decay: matrices do; norms, biases, scalars and mixing coefficients do not."""

from collections.abc import Iterable
from typing import Any

import torch

from wakeful.errors import WakefulError
from wakeful.families import role_outside_layers
from wakeful.roles import role_of

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


def decay_groups(
    named_parameters: NamedParameters, *, weight_decay: float, decay_embeddings: bool = True
) -> list[dict[str, Any]]:
    """Return parameter groups for any torch optimizer, names kept: what decays, then the rest.

    Tensors with two or more dimensions decay by `weight_decay`, unless their module declares that
    they do not; others have weight decay 0, and so have embeddings (tokens and positions; a tied
    head with them) if `decay_embeddings` is False. An empty group is left out. Frozen parameters
    stay in: without a gradient they never move.

    Raises:
        WakefulError: there is no parameter, or one parameter comes twice.
    """
    decayed: list[tuple[str, torch.nn.Parameter]] = []
    kept: list[tuple[str, torch.nn.Parameter]] = []
    seen: dict[int, str] = {}
    for name, parameter in named_parameters:
        if id(parameter) in seen:
            raise WakefulError(
                f"{seen[id(parameter)]} and {name} are one parameter; pass it once, as "
                "model.named_parameters() does"
            )
        seen[id(parameter)] = name
        role = role_of(parameter) or role_outside_layers(name)
        spared = role is not None and not (role.decays and (decay_embeddings or not role.embedding))
        decays = parameter.dim() >= 2 and not spared
        (decayed if decays else kept).append((name, parameter))
    if not seen:
        raise WakefulError("there is no parameter to optimize")
    groups = (
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]
