"""The rotations of an optimizer: its settings, and the rotations of each parameter."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wakeful.device import free_memory
from wakeful.errors import WakefulError
from wakeful.optim.axes import plain_name
from wakeful.optim.rotations.base import Identity, LearnedRotation, Rotation
from wakeful.optim.sharding import fill_moment, layout_for, zeros
from wakeful.parts.orthoadam import generator_for, moment_dtype


@dataclass(eq=False)
class RotatedParameter:
    """A parameter's name, shape, rotated axes with the reason, and rotations."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()
    why: str = ""
    rotations: tuple[Rotation, ...] | None = None
    """One for each axis; None until the parameter's first step."""
    made_for: tuple[torch.device, torch.dtype] | None = None
    """The device and dtype of the rotations."""

    def learned(self) -> dict[str, Tensor]:
        """Return the tensors of learned rotations, by the names that they have in the optimizer's
        state; none before the rotations are made.
        """
        return {
            f"rotation_{axis}_{key}": tensor
            for axis, rotation in zip(self.axes, self.rotations or (), strict=False)
            if isinstance(rotation, LearnedRotation)
            for key, tensor in rotation.state().items()
        }

    def moment(self, parameter: Tensor, saved: Tensor | None = None) -> Tensor:
        """Return a new moment of the parameter, zero or a copy of `saved`, laid out in memory so
        that the first rotated axis is contiguous.
        """
        layout = layout_for(parameter, self.axes)
        transposed = self.axes[:1] == (0,)
        moment = zeros(parameter, layout, moment_dtype(parameter), transposed=transposed)
        return moment if saved is None else fill_moment(moment, saved)


@dataclass(frozen=True)
class RotationRecipe:
    """Settings from which the rotations of all parameters are made."""

    rotation: Rotation
    seed: int
    share: bool
    """Whether all axes of a width have one rotation."""
    shared: dict[Any, Rotation] = field(default_factory=dict)
    """With `share`, the rotations made so far, by device, dtype and width."""

    def __post_init__(self) -> None:
        if self.learns and self.share:
            raise WakefulError(
                f"share=True cannot go with {self.rotation}, which learns from each weight"
            )

    @property
    def rotates(self) -> bool:
        return not isinstance(self.rotation, Identity)

    @property
    def learns(self) -> bool:
        return isinstance(self.rotation, LearnedRotation)

    def describe(self, rotated: RotatedParameter) -> list[dict[str, Any]]:
        """Return a parameter's rotations for a checkpoint: one entry per axis, no matrices."""
        return [
            {
                "kind": str(self.rotation),
                "seed": self.seed,
                "name": "*" if self.share else plain_name(rotated.name),
                "axis": axis,
                "width": rotated.shape[axis],
            }
            for axis in rotated.axes
        ]

    def make_all(self, rotated: RotatedParameter, parameter: Tensor) -> tuple[Rotation, ...]:
        """Return the rotations of a parameter's axes, for its device and its moments' dtype."""
        made_for = parameter.device, moment_dtype(parameter)
        return tuple(self.make(rotated, axis, *made_for) for axis in rotated.axes)

    def make(
        self, rotated: RotatedParameter, axis: int, device: torch.device, dtype: torch.dtype
    ) -> Rotation:
        """Return the rotation of one axis, from the seed, the parameter's name and the axis; with
        `share` the one that all axes of this width have.
        """
        width = rotated.shape[axis]
        if (device, dtype, width) in self.shared:
            return self.shared[device, dtype, width]
        if self.share:
            generator = generator_for(self.seed, f"*{width}", 0)
        else:
            generator = generator_for(self.seed, plain_name(rotated.name), axis)
        try:
            rotation = self.rotation.for_width(
                width, generator=generator, device=device, dtype=dtype
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise WakefulError(
                f"no memory for the {self.rotation} rotation of {rotated.name}, {width} wide; use "
                "rotation='hadamard', or share=True"
            ) from error
        if self.share:
            self.shared[device, dtype, width] = rotation
        return rotation

    def check_memory(self, rotated_axes: Iterable[tuple[Tensor, tuple[int, ...]]]) -> None:
        """Raise `WakefulError` if the rotations of parameters, (parameter, its rotated axes) each,
        do not fit in their device's free memory.
        """
        # For each device: (width, bytes of an element) of every rotation.
        sizes_on: dict[torch.device, list[tuple[int, int]]] = {}
        for parameter, axes in rotated_axes:
            sizes = sizes_on.setdefault(parameter.device, [])
            for axis in axes:
                size = (parameter.shape[axis], moment_dtype(parameter).itemsize)
                if not (self.share and size in sizes):
                    sizes.append(size)
        for device, sizes in sizes_on.items():
            needed = sum(self.rotation.memory(*size) for size in sizes)
            # They are made one after the other.
            needed += max((self.rotation.making_memory(*size) for size in sizes), default=0)
            free = free_memory(device)
            if needed > free:
                raise WakefulError(
                    f"the {self.rotation} rotations, up to {max(sizes)[0]} wide, need "
                    f"{needed / 1e9:.1f} GB and {device} has {free / 1e9:.1f} GB free; use "
                    "rotation='hadamard', or share=True"
                )
