"""Small problems for OrthoAdam, and what it must equal on them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wakeful.optim.orthoadam import OrthoAdam
from wakeful.optim.rotations import find_rotation, rotation_names
from wakeful.optim.rotations.base import generator_for
from wakeful.optim.sides import Rule

RULES = (Rule("rows", 1), Rule("columns", 0), Rule("free", None, optional=True))
SEEDED = [name for name in rotation_names() if not find_rotation(name).learns]
KERNELS = ("chunked", "foreach")
WIDTH = 12
OPTIONS: dict[str, Any] = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.3}


def weights(dtype: torch.dtype = torch.float64, width: int = WIDTH) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"rows": (7, width), "columns": (width, 5), "free": (3, 4), "bias": (5,), "scale": ()}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in shapes.items()
    }


def loss_of(w: dict[str, Any], step: int) -> Tensor:
    """A loss that is no sum over coordinates, another at every step."""
    width = w["rows"].shape[1]
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, width, generator=generator, dtype=torch.float64).to(w["rows"].dtype)
    hidden = torch.tanh(x @ w["rows"].mT)
    skip = x @ w["columns"] * w["scale"] + w["bias"]
    return (hidden.square().mean() + (skip - 1).square().mean() + w["free"].sin().sum() / 9) * 2


def train(
    w: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    steps: int,
    start: int = 0,
    loss: Callable[[dict[str, Any], int], Tensor] = loss_of,
) -> None:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss(w, step).backward()
        optimizer.step()


def ortho(w: dict[str, nn.Parameter], rotation: str, **more: Any) -> OrthoAdam:
    rules = more.pop("rules", RULES)
    return OrthoAdam(w.items(), rotation=rotation, rules=rules, **{**OPTIONS, **more})


def assert_same(a: dict[str, nn.Parameter], b: dict[str, Any], tolerance: float) -> None:
    for name, value in a.items():
        torch.testing.assert_close(value.data, b[name].data, rtol=0, atol=tolerance)


def dense(rotation: str, name: str, axis: int, width: int, seed: int = 0) -> Tensor:
    made = find_rotation(rotation)(  # pyright: ignore[reportCallIssue]
        width, generator=generator_for(seed, name, axis), dtype=torch.float64
    )
    return made.into(torch.eye(width, dtype=torch.float64)).mT
