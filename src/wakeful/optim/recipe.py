"""The rotations of an optimiser: what was asked for, and what each parameter gets."""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.optim.rotations import Learned, Rotation, find_rotation
from wakeful.optim.rotations.base import generator_for
from wakeful.optim.sharding import layout_for, zeros
from wakeful.optim.sides import plain_name


@dataclass(eq=False)
class Plan:
    """What is decided once for a parameter."""

    name: str | None
    title: str
    shape: tuple[int, ...]
    sharded: bool
    axes: tuple[int, ...] = ()
    rotations: tuple[Rotation, ...] | None = None
    made_for: tuple[torch.device, torch.dtype] | None = None


@dataclass(frozen=True)
class Recipe:
    """The rotation asked for, before it has a width."""

    cls: type[Rotation]
    kind: str
    options: dict[str, int | float]
    seed: int
    share: bool

    @staticmethod
    def of(
        rotation: str | type[Rotation], options: dict[str, int | float], seed: int, share: bool
    ) -> "Recipe":
        cls = find_rotation(rotation) if isinstance(rotation, str) else rotation
        kind = rotation if isinstance(rotation, str) else cls.__name__
        fixed = {"width", "generator", "device", "dtype"}
        allowed = [key for key in inspect.signature(cls).parameters if key not in fixed]
        for key in options:
            if key not in allowed:
                raise WakefulError(
                    f"rotation_options has {key!r}; {kind} takes {', '.join(allowed) or 'none'}"
                )
        if cls.learns and share:
            raise WakefulError(f"share=True cannot go with {kind}, which learns from each weight")
        return Recipe(cls, kind, options, seed, share)

    @property
    def rotates(self) -> bool:
        return self.kind != "identity"

    def describe(self, plan: Plan) -> list[dict[str, Any]]:
        """What a checkpoint says of a parameter's rotations: one entry an axis, never a matrix."""
        return [
            {
                "kind": self.kind,
                **self.options,
                "seed": self.seed,
                "name": "*" if self.share else plain_name(cast(str, plan.name)),
                "axis": axis,
                "width": plan.shape[axis],
            }
            for axis in plan.axes
        ]

    def build(
        self,
        plan: Plan,
        axis: int,
        device: torch.device,
        dtype: torch.dtype,
        others: Iterable[Plan],
    ) -> Rotation:
        """The rotation of one axis; with ``share`` another plan's, where one has that width."""
        width = plan.shape[axis]
        if self.share:
            for other in others:
                if other.rotations is not None and other.made_for == (device, dtype):
                    for known, rotation in zip(other.axes, other.rotations, strict=True):
                        if other.shape[known] == width:
                            return rotation
        name = f"*{width}" if self.share else plain_name(cast(str, plan.name))
        generator = generator_for(self.seed, name, 0 if self.share else axis)
        make = cast(Callable[..., Rotation], self.cls)
        try:
            return make(width, generator=generator, device=device, dtype=dtype, **self.options)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise WakefulError(
                f"no memory for the {self.kind} rotation of {plan.title}, {width} wide; use "
                "rotation='hadamard', or share=True"
            ) from error

    def check_memory(self, work: Iterable[tuple[Tensor, tuple[int, ...]]]) -> None:
        """Raises a WakefulError where the rotations would not fit in free memory."""
        needed: dict[torch.device, int] = {}
        making: dict[torch.device, int] = {}
        widest: dict[torch.device, int] = {}
        seen: set[tuple[torch.device, int]] = set()
        for parameter, axes in work:
            device, itemsize = parameter.device, moment_dtype(parameter).itemsize
            for width in (parameter.shape[axis] for axis in axes):
                if self.share and (device, width) in seen:
                    continue
                seen.add((device, width))
                amount = self.cls.memory(width, itemsize, self.options)
                needed[device] = needed.get(device, 0) + amount
                temporary = self.cls.making_memory(width, itemsize)
                making[device] = max(making.get(device, 0), temporary)
                widest[device] = max(widest.get(device, 0), width)
        for device, held in needed.items():
            amount = held + making[device]
            free = _free_memory(device)
            if amount > free:
                raise WakefulError(
                    f"the {self.kind} rotations, up to {widest[device]} wide, need "
                    f"{amount / 1e9:.1f} GB and {device} has {free / 1e9:.1f} GB free; use "
                    "rotation='hadamard', or share=True"
                )


def moment_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def new_moment(parameter: Tensor, plan: Plan) -> Tensor:
    """Zeros of the parameter's shape, laid out so that its rotated axis is contiguous."""
    turned = bool(plan.axes) and plan.axes[0] == 0
    layout = layout_for(parameter, plan.axes)
    return zeros(parameter, layout, moment_dtype(parameter), turned)


def learned_tensors(plan: Plan) -> Iterator[tuple[str, Tensor]]:
    for axis, rotation in zip(plan.axes, plan.rotations or (), strict=False):
        if isinstance(rotation, Learned):
            for key, tensor in rotation.state().items():
                yield f"rotation_{axis}_{key}", tensor


def _free_memory(device: torch.device) -> int:
    """Free bytes of a device; of the host, all its memory where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
