"""Sharded parameters (DTensor: FSDP2, tensor parallel): each rank rotates whole rows of its own.

A rotation needs its axis whole on every rank. A weight sharded along that axis is resharded along
the other one for the step, gradient in and weight out, and its moments stay sharded that way.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from wakeful.errors import WakefulError

TensorPlacements = tuple[Placement, ...] | None
"""How a DTensor lies over the ranks; None for a tensor that is not sharded."""


def layout_for(parameter: Tensor, axes: tuple[int, ...]) -> TensorPlacements:
    """Return how a parameter must lie over the ranks for a step that rotates `axes`, which must be
    whole on every rank; None for a tensor that is not a DTensor.

    A rotated axis that is sharded is exchanged for the other one; where both are rotated, the
    parameter is whole on every rank.
    """
    if not isinstance(parameter, DTensor):
        return None
    layout: list[Placement] = []
    for placement in parameter.placements:
        if isinstance(placement, Partial):
            raise WakefulError("a parameter that is a partial sum over ranks has no step")
        is_rotated = isinstance(placement, Shard) and placement.dim % parameter.dim() in axes
        if not is_rotated:
            layout.append(placement)
        elif len(axes) == 1:
            layout.append(Shard(1 - axes[0]))
        else:
            layout.append(Replicate())
    return tuple(layout)


def local_part(tensor: Tensor, layout: TensorPlacements) -> Tensor:
    """Return this rank's part of a tensor in `layout`.

    It is the tensor's own storage where the tensor lies so already, or is not sharded.
    """
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=layout).to_local()
    return tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as it lies; a tensor that is not sharded itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def write_back(parameter: Tensor, part: Tensor, layout: TensorPlacements) -> None:
    """Write a part computed in `layout` into the parameter.

    Where the parameter lies so itself, the part is its own storage, and nothing is to be done.
    """
    if isinstance(parameter, DTensor) and parameter.placements != layout:
        computed = _assemble(part.contiguous(), parameter, layout)
        own_part(parameter).copy_(local_part(computed, parameter.placements))


def zeros(
    parameter: Tensor, layout: TensorPlacements, dtype: torch.dtype, *, transposed: bool
) -> Tensor:
    """Return zeros of the parameter's shape in `layout`; with `transposed` a matrix lies in memory
    column by column.
    """
    part = local_part(parameter, layout)
    if transposed:
        result = torch.zeros(part.shape[::-1], dtype=dtype, device=part.device).mT
    else:
        result = torch.zeros(part.shape, dtype=dtype, device=part.device)
    return _assemble(result, parameter, layout) if isinstance(parameter, DTensor) else result


def _assemble(part: Tensor, like: DTensor, layout: TensorPlacements) -> DTensor:
    """Return a DTensor of `like`'s shape and mesh in `layout`, of which `part` is this rank's."""
    return DTensor.from_local(
        part, like.device_mesh, layout, run_check=False, shape=like.shape, stride=like.stride()
    )


def fill_moment(moment: Tensor, saved: Tensor) -> Tensor:
    """Copy a saved moment, whole or sharded in any way, into `moment`; return `moment`."""
    if not isinstance(moment, DTensor):
        return moment.copy_(full_tensor(saved))
    if not isinstance(saved, DTensor):
        saved = distribute_tensor(saved, moment.device_mesh, moment.placements)
    moment.to_local().copy_(local_part(saved, moment.placements))
    return moment


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
