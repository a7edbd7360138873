"""Every optimizer by one name: OrthoAdam, Muon, and torch's for Table 5.

From Attention to Activation, Table 5, compares Adam with RMSProp and SGD with and without momentum.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from wakeful.errors import WakefulError
from wakeful.optim.groups import NamedParameters, decay_groups
from wakeful.optim.muon import MuonAdamW, can_fuse
from wakeful.optim.orthoadam import OrthoAdam

Groups = list[dict[str, Any]]


def build_optimizer(
    name: str,
    named_parameters: NamedParameters,
    *,
    weight_decay: float = 0.1,
    decay_embeddings: bool = True,
    **options: Any,
) -> torch.optim.Optimizer:
    """Return the optimizer of that name over `decay_groups` of the parameters.

    `name` is adamw, orthoadam, rmsprop, sgd, sgd_momentum or muon; `options` are its own, as its
    function below spells them. Weight decay is decoupled in adamw, orthoadam and muon; in torch's
    rmsprop and sgd it is added to the gradient.

    Raises:
        WakefulError: the name or an option is unknown, a value is out of range, or `decay_groups`
            refuses the parameters.
    """
    if name not in BUILDERS:
        raise WakefulError(f"optimizer={name!r} is not one of {', '.join(BUILDERS)}")
    build = BUILDERS[name]
    allowed = list(inspect.signature(build).parameters)[1:]
    for key in options:
        if key not in allowed:
            raise WakefulError(f"{name} has no option {key!r}; it takes {', '.join(allowed)}")
    if not options.get("eps", 1) > 0:
        raise WakefulError(
            f"{name}: eps must be above 0, got {options['eps']}: without it a gradient that stays "
            "zero gives 0 / 0"
        )
    groups = decay_groups(
        named_parameters, weight_decay=weight_decay, decay_embeddings=decay_embeddings
    )
    try:
        return build(groups, **options)
    except WakefulError:
        raise
    except ValueError as error:
        raise WakefulError(f"{name}: {error}") from error


def adamw(
    groups: Groups,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Return torch's AdamW, fused where the parameters' devices have the fused step."""
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=can_fuse(groups))


def rmsprop(
    groups: Groups, *, lr: float = 1e-3, alpha: float = 0.99, eps: float = 1e-8
) -> torch.optim.Optimizer:
    """Return torch's RMSProp, without momentum."""
    return torch.optim.RMSprop(groups, lr=lr, alpha=alpha, eps=eps)


def sgd(groups: Groups, *, lr: float = 1e-1) -> torch.optim.Optimizer:
    """Return torch's SGD without momentum."""
    return torch.optim.SGD(groups, lr=lr)


def sgd_momentum(
    groups: Groups, *, lr: float = 1e-1, momentum: float = 0.9, nesterov: bool = False
) -> torch.optim.Optimizer:
    """Return torch's SGD with momentum."""
    if momentum <= 0:
        raise WakefulError(f"momentum={momentum} must be above 0; sgd is the one without")
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)


def muon(
    groups: Groups,
    *,
    lr: float = 1e-3,
    momentum: float = 0.95,
    ns_steps: int = 5,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Return Muon for the hidden matrices and AdamW for the rest, as one optimizer."""
    return MuonAdamW(groups, lr=lr, momentum=momentum, ns_steps=ns_steps, betas=betas, eps=eps)


BUILDERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": adamw,
    "orthoadam": OrthoAdam,
    "rmsprop": rmsprop,
    "sgd": sgd,
    "sgd_momentum": sgd_momentum,
    "muon": muon,
}
"""By name. The class of OrthoAdam is its own builder."""
