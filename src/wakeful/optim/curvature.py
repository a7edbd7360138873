"""SOAP and Shampoo by pytorch-optimizer: what Adam does in the basis of a matrix's own gradients.

The library's optimizers cannot be copied: what is here copies all that one has.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from wakeful.errors import WakefulError
from wakeful.optim.nested import take_nested_step
from wakeful.plugins import optional

_SHARED = ("param_groups", "state")


class Curved(torch.optim.Optimizer):
    """An optimizer of pytorch-optimizer's over the same groups and state."""

    def __init__(self, groups: list[dict[str, Any]], name: str, **options: Any) -> None:
        for group in groups:
            for known, parameter in group["params"]:
                if isinstance(parameter, DTensor):
                    raise WakefulError(
                        f"{name.lower()} needs whole matrices, and {known} is in shares: use "
                        "train.parallel = 'ddp'"
                    )
        package = optional(
            "pytorch-optimizer", extra="optimizers", wants=f"optimizer.name = {name.lower()}",
            otherwise=", or leave it out of a comparison with --only",
        )  # fmt: skip
        self._theirs = getattr(package, name)(groups, **options)
        super().__init__(self._theirs.param_groups, dict(self._theirs.defaults))
        self._link()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of theirs alone would lack what torch does not know of.
        theirs = {key: value for key, value in vars(self._theirs).items() if key not in _SHARED}
        return {**super().__getstate__(), "_theirs": (type(self._theirs), theirs)}

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy, and of what is loaded
        super().__setstate__(state)
        if "_theirs" in state:
            kind, theirs = state["_theirs"]
            self._theirs = kind.__new__(kind)
            vars(self._theirs).update(theirs)
        self._link()

    def _link(self) -> None:
        self._theirs.param_groups = self.param_groups
        self._theirs.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step; return the closure's loss, if there is a closure."""
        return take_nested_step(self._theirs, closure)


def soap(
    groups: list[dict[str, Any]],
    *,
    lr: float = 3e-3,
    betas: tuple[float, float] = (0.95, 0.95),
    eps: float = 1e-8,
    every: int = 10,
    max_width: int = 10_000,
) -> torch.optim.Optimizer:
    """Return SOAP (Vyas et al., 2409.11321), Adam in the eigenbasis of Shampoo's sums of squares.

    The basis turns every `every` steps; a side wider than `max_width` (a vocabulary) keeps its own.
    Weight decay is decoupled. The first step makes the bases and moves nothing.
    """
    return Curved(
        groups, "SOAP", lr=lr, betas=betas, eps=eps, precondition_frequency=every,
        max_precondition_dim=max_width,
    )  # fmt: skip


def shampoo(
    groups: list[dict[str, Any]], *, lr: float = 1e-1, every: int = 1, matrix_eps: float = 1e-6
) -> torch.optim.Optimizer:
    """Return Shampoo (Gupta et al., 1802.09568): L^{-1/4} G R^{-1/4} with L = ε + Σ G Gᵀ, R alike.

    The roots are taken anew every `every` steps, the first time after `every`; before, weights only
    decay. Sums over all steps, as published, and no momentum: its learning rate is not Adam's. Each
    side of each matrix has a square matrix of its own. Weight decay is decoupled.
    """
    if every < 1:
        raise WakefulError(f"shampoo: every must be at least 1, got {every}")
    for group in groups:
        for name, parameter in group["params"]:
            if max(parameter.shape, default=0) > _WIDEST:
                raise WakefulError(
                    f"shampoo keeps a square matrix a side, and {name} is {max(parameter.shape)} "
                    f"wide, more than {_WIDEST}: use soap"
                )
    decoupled = [{**group, "weight_decouple": True} for group in groups]
    return Curved(
        decoupled, "Shampoo", lr=lr, preconditioning_compute_steps=every, matrix_eps=matrix_eps
    )


_WIDEST = 8192
