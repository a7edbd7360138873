"""Optimizers as other packages write them: odd states, odd options, and what cannot train."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class Descent(torch.optim.Optimizer):
    """Gradient descent that a subclass makes odd."""

    def __init__(self, groups: Any, *, lr: float, weight_decay: float = 0.0, **more: Any) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, **more})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.scale(group, p))

    def scale(self, group: dict[str, Any], p: torch.Tensor) -> float:
        return p.grad


class Nested(Descent):
    """Lists, dictionaries, halves, strings and transposed tensors by parameter; tensors and counts
    in groups, one of which both share; and a state of no parameter.
    """

    def __init__(self, groups: Any, *, lr: float, kind: torch.dtype = torch.float32) -> None:
        super().__init__(groups, lr=lr, count=0, best=float("-inf"), kind=kind, pair=(1, 2.0))
        shared = torch.zeros(())
        for group in self.param_groups:
            group["total"] = shared

    def scale(self, group: dict[str, Any], p: torch.Tensor) -> Any:
        state = self.state[p]
        if not state:
            state["sides"] = [torch.zeros(n) for n in p.shape]
            state["by"] = {0.9: torch.zeros_like(p), 0.5: {"half": torch.zeros(3).bfloat16()}}
            state["words"] = ["a,b->c", "x"]
            state["turned"] = torch.zeros(*p.shape[::-1]).T if p.dim() == 2 else None
        state["by"][0.9].lerp_(p.grad, 0.1)
        state["by"][0.5]["half"].add_(p.grad.flatten()[:3])
        for n, side in enumerate(state["sides"]):
            side.lerp_(p.grad.mean([d for d in range(p.dim()) if d != n]), 0.3)
        if p.dim() == 2:
            state["turned"] += p.grad
        group["count"] += 1
        group["best"] = max(group["best"], float(p.grad.max()))
        group["total"] = group["total"] + p.grad.norm()
        self.state["all"] = {"seen": self.state.get("all", {"seen": 0})["seen"] + 1}
        worth = 1 + group["count"] / 100 + group["best"] / 10 + float(group["total"]) / 100
        worth += self.state["all"]["seen"] / 1000 + len(state["words"][0]) / 100
        half = state["by"][0.5]["half"].float().mean()
        matrix = 0 if state["turned"] is None else (state["turned"] @ state["turned"].T).mean()
        return state["by"][0.9] * worth + half + matrix + sum(s.mean() for s in state["sides"])


class Averaged(Descent):
    """It trains other weights than it evaluates, as schedule-free optimizers do."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def two_rates(groups: Any, *, lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Return AdamW with a fifth of the rate for what does not decay."""
    rated = [{**g, "lr": lr if g["weight_decay"] else lr / 5} for g in groups]
    return torch.optim.AdamW(rated, lr=lr, betas=betas)


class Queued(Descent):
    """Its state is a queue."""

    def scale(self, group: dict[str, Any], p: torch.Tensor) -> Any:
        self.state[p]["before"] = deque([p.grad])
        return p.grad


class Closed(Descent):
    """It takes no step without a closure."""

    def step(self, closure: Callable[[], float]) -> None:  # pyright: ignore
        closure()


class Late(Descent):
    """It finds out at its first step what is wrong with its options."""

    def __init__(self, groups: Any, *, lr: float, betas: Any = (0.9, 0.99, 0.999)) -> None:
        super().__init__(groups, lr=lr, betas=betas)

    def scale(self, group: dict[str, Any], p: torch.Tensor) -> Any:
        _, _, third = group["betas"]
        return p.grad * third


class Modelled(Descent):
    """It takes a model where others take groups."""

    def __init__(self, model: Any, *, lr: float) -> None:
        super().__init__(model.parameters(), lr=lr)
