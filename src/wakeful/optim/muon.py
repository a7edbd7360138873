"""Muon (Jordan 2024, in torch) as a whole optimizer: the modern comparison beside OrthoAdam."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.optim.rates import Rate, check_rates
from wakeful.variants.families import role_outside_layers
from wakeful.variants.roles import role_of

Groups = list[dict[str, Any]]
"""Groups of named parameters, as torch's optimizers take them."""
_MOST_STEPS = 99
"""Most Newton-Schulz steps that torch takes."""


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon on the hidden matrices, AdamW on embeddings, head and 1-D parameters.

    Muon's step is scaled to the size of AdamW's (`match_rms_adamw`), so both take one `lr` and one
    schedule. Muon's author gives embeddings and head a rate of their own: `adamw_lr` (0: `lr`),
    kept in each group as `lr_scale`, the ratio to `lr`, which every schedule keeps. `groups` must
    be named: where no role tells embeddings and heads, their names do. Schedules that cycle the
    momentum (`OneCycleLR`) cycle Muon's; AdamW's betas stay.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: Rate = 1e-3,
        momentum: float = 0.95,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_lr: float = 0.0,
    ) -> None:
        """Give hidden matrices to Muon and all other parameters to AdamW.

        `betas` and `eps` are AdamW's, and so is the learning rate `adamw_lr` (0: `lr` for both).

        Raises:
            WakefulError: an option is out of its range, or there is no hidden matrix.
        """
        for group in ({"lr": lr}, *groups):
            check_rates(group)
        if adamw_lr < 0 or (adamw_lr and not lr):
            raise WakefulError(
                f"muon: adamw_lr must be above 0 beside an lr above 0, or 0 for lr itself; got "
                f"{adamw_lr} and lr = {lr}"
            )
        if not 1 <= ns_steps <= _MOST_STEPS or not 0 <= momentum < 1:
            raise WakefulError(
                f"muon: ns_steps must be 1 to {_MOST_STEPS} and momentum at least 0 and below 1, "
                f"got {ns_steps} and {momentum}"
            )
        hidden, rest = _split_groups(groups)
        if not hidden:
            raise WakefulError("muon found no hidden matrix to optimize; use adamw")
        rate: Any = lr  # a tensor too, which Muon's annotation leaves out
        muon = torch.optim.Muon(
            hidden, lr=rate, momentum=momentum, ns_steps=ns_steps, adjust_lr_fn="match_rms_adamw"
        )
        self._parts: list[torch.optim.Optimizer] = [muon]
        if rest:
            scale = adamw_lr / lr if adamw_lr else 1.0  # schedules keep this ratio to `lr`
            rest = [{**group, "lr": lr * scale, "lr_scale": scale} for group in rest]
            adamw = torch.optim.AdamW(rest, betas=betas, eps=eps, fused=can_fuse(rest))
            self._parts.append(adamw)
        super().__init__([group for part in self._parts for group in part.param_groups], {"lr": lr})
        # For schedules that cycle it. Defaults given above would be filled into AdamW's groups too.
        self.defaults["momentum"] = momentum
        self._has_all_groups = True
        self._link()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts, "_has_all_groups": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copied or loaded optimizer, and link the parts to it again."""
        super().__setstate__(state)
        self._link()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group after construction: the constructor divides all between the parts."""
        if getattr(self, "_has_all_groups", False):  # unset while the base class adds them
            raise WakefulError("muon takes no further group: give it all parameters at once")
        super().add_param_group(param_group)

    def _link(self) -> None:
        """Make Muon and AdamW, the parts, work on this optimizer's own groups and state.

        Loading and copying replace these objects, so that the parts must be linked again.
        """
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state
            part.__setstate__({})  # brings what an older torch saved to this one's form

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step of Muon and AdamW; return the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            step: Any = type(part).step
            step.__wrapped__(part)  # without torch's hooks, which this optimizer's step has called
        return loss


def can_fuse(groups: list[dict[str, Any]]) -> bool:
    """Return True if torch's AdamW has a fused step for all parameters of these groups."""
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    return all(p.device.type in {"cpu", "cuda"} and p.is_floating_point() for p in parameters)


def _split_groups(groups: Groups) -> tuple[Groups, Groups]:
    """Divide each group into hidden matrices and other parameters; return (groups of the former,
    groups of the latter), leaving out empty ones. A group's options are kept.
    """
    hidden: Groups = []
    rest: Groups = []
    for group in groups:
        for divided_groups, is_hidden in ((hidden, True), (rest, False)):
            chosen = [(name, p) for name, p in group["params"] if _is_hidden(name, p) == is_hidden]
            if chosen:
                divided_groups.append({**group, "params": chosen})
    return hidden, rest


def _is_hidden(name: str, parameter: Tensor) -> bool:
    """Return True for a hidden matrix: it reads or writes the residual stream, and is neither an
    embedding nor a head.

    A matrix counts as hidden if it has no declared role and its name tells nothing.
    """
    role = role_of(parameter) or role_outside_layers(name)
    in_stream = role is None or (role.residual is not None and not role.vocabulary)
    return parameter.dim() == 2 and in_stream
