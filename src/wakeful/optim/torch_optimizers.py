"""Every optimiser by one name: OrthoAdam and torch's own, for Table 5 and the modern comparison.

From Attention to Activation, Table 5, compares Adam with RMSProp and SGD with and without momentum.
Muon (Jordan 2024, in torch) is the modern comparison beside OrthoAdam's eigenbasis.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from wakeful.errors import WakefulError
from wakeful.optim.groups import NamedParameters, decay_groups, is_embedding, is_head, is_mixing
from wakeful.optim.orthoadam import OrthoAdam
from wakeful.optim.rotations import Rotation
from wakeful.optim.sides import Rule

Groups = list[dict[str, Any]]


def build_optimizer(
    name: str,
    named_parameters: NamedParameters,
    *,
    weight_decay: float = 0.1,
    decay_embeddings: bool = True,
    **options: Any,
) -> torch.optim.Optimizer:
    """The optimiser of that name over ``decay_groups`` of the parameters.

    ``name`` is adamw, orthoadam, rmsprop, sgd, sgd_momentum or muon; ``options`` are its own, as
    the function of that name below spells them. Weight decay is decoupled in adamw, orthoadam and
    muon; in torch's rmsprop and sgd it is added to the gradient. Raises a WakefulError for a name
    or an option that is not known, for what ``decay_groups`` refuses, and for values out of range.
    """
    if name not in BUILDERS:
        raise WakefulError(f"optimizer={name!r} is not one of {', '.join(BUILDERS)}")
    build = BUILDERS[name]
    allowed = list(inspect.signature(build).parameters)[1:]
    for key in options:
        if key not in allowed:
            raise WakefulError(f"{name} has no option {key!r}; it takes {', '.join(allowed)}")
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
    """torch's AdamW, fused where the parameters' devices have the fused step."""
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=_can_fuse(groups))


def orthoadam(
    groups: Groups,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    rotation: str | type[Rotation] = "hadamard",
    rotation_options: Mapping[str, int | float] | None = None,
    seed: int = 0,
    rules: str | Iterable[Rule] = "auto",
    sides: str = "residual",
    share: bool = False,
    kernel: str = "auto",
) -> torch.optim.Optimizer:
    """OrthoAdam; its class explains the options."""
    return OrthoAdam(
        groups,
        lr=lr,
        betas=betas,
        eps=eps,
        rotation=rotation,
        rotation_options=rotation_options,
        seed=seed,
        rules=rules,
        sides=sides,
        share=share,
        kernel=kernel,
    )


def rmsprop(
    groups: Groups, *, lr: float = 1e-3, alpha: float = 0.99, eps: float = 1e-8
) -> torch.optim.Optimizer:
    """torch's RMSProp, without momentum."""
    return torch.optim.RMSprop(groups, lr=lr, alpha=alpha, eps=eps)


def sgd(groups: Groups, *, lr: float = 1e-1) -> torch.optim.Optimizer:
    """torch's SGD without momentum."""
    return torch.optim.SGD(groups, lr=lr)


def sgd_momentum(
    groups: Groups, *, lr: float = 1e-1, momentum: float = 0.9, nesterov: bool = False
) -> torch.optim.Optimizer:
    """torch's SGD with momentum."""
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
    """Muon for the hidden matrices and AdamW for the rest, as one optimiser (``MuonAdamW``)."""
    return MuonAdamW(groups, lr=lr, momentum=momentum, ns_steps=ns_steps, betas=betas, eps=eps)


BUILDERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": adamw,
    "orthoadam": orthoadam,
    "rmsprop": rmsprop,
    "sgd": sgd,
    "sgd_momentum": sgd_momentum,
    "muon": muon,
}


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon on the hidden matrices, AdamW on embeddings, head and 1-D parameters.

    Muon's step is scaled to the size of AdamW's (``match_rms_adamw``), so both take one ``lr`` and
    one schedule. ``groups`` must be named: an embedding or a head is known by its name.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        lr: float,
        momentum: float,
        ns_steps: int,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        hidden: Groups = []
        rest: Groups = []
        for group in groups:
            for chosen, wanted in ((hidden, True), (rest, False)):
                some = [(n, p) for n, p in group["params"] if _is_hidden(n, p) == wanted]
                if some:
                    chosen.append({**group, "params": some})
        if not hidden:
            raise WakefulError("muon found no hidden matrix to optimise; use adamw")
        self._muon = torch.optim.Muon(
            hidden, lr=lr, momentum=momentum, ns_steps=ns_steps, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = (
            torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps, fused=_can_fuse(rest))
            if rest
            else None
        )
        parts = (self._muon, self._adamw) if self._adamw is not None else (self._muon,)
        super().__init__([group for part in parts for group in part.param_groups], {"lr": lr})
        self._link()

    def _link(self) -> None:
        """The two parts work on this optimiser's own groups and state."""
        count = len(self._muon.param_groups)
        self._muon.param_groups = self.param_groups[:count]
        self._muon.state = self.state
        if self._adamw is not None:
            self._adamw.param_groups = self.param_groups[count:]
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of both; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._muon.step()
        if self._adamw is not None:
            self._adamw.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().load_state_dict(state_dict)
        self._link()


def _is_hidden(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 2 and not (is_embedding(name) or is_head(name) or is_mixing(name))


def _can_fuse(groups: Groups) -> bool:
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    return all(p.device.type in {"cpu", "cuda"} and p.is_floating_point() for p in parameters)
