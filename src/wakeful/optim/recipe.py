"""The rotations of an optimizer: its settings, and the rotations of each parameter."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
        """Return the tensors of learned rotations by their names in the optimizer's state, such as
        "rotation_1_basis"; {} before the rotations are made, or if none is learned.
        """
        if self.rotations is None:
            return {}
        return {
            f"rotation_{axis}_{key}": tensor
            for axis, rotation in zip(self.axes, self.rotations, strict=True)
            if isinstance(rotation, LearnedRotation)
            for key, tensor in rotation.state().items()
        }

    def moment(self, parameter: Tensor, saved: Tensor | None = None) -> Tensor:
        """Return a new moment of the parameter, zero or a copy of `saved`.

        It is sharded as a step needs it, and its first rotated axis is contiguous in memory.
        """
        layout = layout_for(parameter, self.axes)
        transposed = self.axes[:1] == (0,)  # the first rotated axis is 0
        moment = zeros(parameter, layout, moment_dtype(parameter), transposed=transposed)
        return moment if saved is None else fill_moment(moment, saved)


@dataclass(frozen=True)
class RotationRecipe:
    """Settings from which the rotations of all parameters are made."""

    rotation: Rotation
    seed: int

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
                "name": plain_name(rotated.name),
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
        """Return the rotation of one axis, made from the seed, the parameter's name and the axis.

        Raises:
            WakefulError: there is not enough memory for it.
        """
        width = rotated.shape[axis]
        generator = generator_for(self.seed, plain_name(rotated.name), axis)
        try:
            return self.rotation.for_width(width, generator=generator, device=device, dtype=dtype)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise WakefulError(
                f"no memory for the {self.rotation} rotation of {rotated.name}, {width} wide; use "
                "rotation='hadamard'"
            ) from error
