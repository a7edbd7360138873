"""Small problems for OrthoAdam, and what it must equal on them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wakeful.optim import LearnedRotation, OrthoAdam, Rotation, rotation_of
from wakeful.parts.orthoadam import generator_for, random_signs
from wakeful.variants import variants_by_name

AXES = {"rows": 1, "columns": 0, "free": ()}
ROTATIONS = tuple(variants_by_name("optim.rotations"))
SEEDED = [name for name in ROTATIONS if not isinstance(rotation_of(name), LearnedRotation)]
KERNELS = ("chunked", "foreach")
WIDTH = 12
OPTIONS: dict[str, Any] = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.3}


class SignedPermutation(Rotation):
    """Q = S P, a permutation of the coordinates with random signs, to which Adam is equivariant."""

    examples = ("signed_permutation",)

    def draw(
        self, width: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
    ) -> None:
        order = torch.randperm(width, generator=generator, device="cpu")
        self.order, self.inverse = order.to(device), order.argsort().to(device)
        self.signs = random_signs(width, generator).to(device, dtype)

    def into(self, grad: Tensor) -> Tensor:
        return grad.index_select(-1, self.order).mul_(self.signs)

    def back(self, step: Tensor) -> Tensor:
        return (step * self.signs).index_select(-1, self.inverse)


def weights(dtype: torch.dtype = torch.float64, width: int = WIDTH) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"rows": (7, width), "columns": (width, 5), "free": (3, 4), "bias": (5,), "scale": ()}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in shapes.items()
    }


def loss_of(w: dict[str, Any], step: int) -> Tensor:
    """A loss that does not separate by coordinates, another at every step."""
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


def ortho(
    w: dict[str, nn.Parameter], rotation: str | Rotation, *, named: bool = True, **more: Any
) -> OrthoAdam:
    """The optimizer of these weights: given with their names, or by themselves, axes by tensor."""
    axes = more.pop("axes", {name: axis for name, axis in AXES.items() if name in w})
    if not named:
        axes = {w[name]: axis for name, axis in axes.items()}
    params = w.items() if named else w.values()
    return OrthoAdam(params, rotation=rotation, axes=axes, **{**OPTIONS, **more})


def assert_same(a: dict[str, nn.Parameter], b: dict[str, Any], tolerance: float) -> None:
    for name, value in a.items():
        torch.testing.assert_close(value.data, b[name].data, rtol=0, atol=tolerance)


def dense(rotation: str, name: str, axis: int, width: int, seed: int = 0) -> Tensor:
    generator = generator_for(seed, name, axis)
    made = rotation_of(rotation).for_width(width, generator=generator, dtype=torch.float64)
    return made.into(torch.eye(width, dtype=torch.float64)).mT
