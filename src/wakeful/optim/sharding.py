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


def layout_for(parameter: Tensor, axes: tuple[int, ...]) -> TensorPlacements:
    """Return how a parameter must lie over the ranks for its step; None for a whole tensor.

    Its own placements where no rotated axis is cut, the other axis cut where one is, and
    whole on every rank where both are rotated.
    """
    if not isinstance(parameter, DTensor):
        return None
    layout: list[Placement] = []
    for placement in parameter.placements:
        if isinstance(placement, Partial):
            raise WakefulError("a parameter that is a partial sum over ranks has no step")
        cut = isinstance(placement, Shard) and placement.dim % parameter.dim() in axes
        if cut and len(axes) == 1:
            layout.append(Shard(1 - axes[0]))
        else:
            layout.append(Replicate() if cut else placement)
    return tuple(layout)


def local_part(tensor: Tensor, layout: TensorPlacements) -> Tensor:
    """Return this rank's part in that layout: the tensor's own storage where it lies so already."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=layout).to_local()
    return tensor


def write_back(parameter: Tensor, part: Tensor, layout: TensorPlacements) -> None:
    """Write a part computed in `layout` into the parameter, where that is another layout."""
    if isinstance(parameter, DTensor) and parameter.placements != layout:
        moved = _assemble(part.contiguous(), parameter, layout)
        parameter.to_local().copy_(moved.redistribute(placements=parameter.placements).to_local())


def zeros(parameter: Tensor, layout: TensorPlacements, dtype: torch.dtype, turned: bool) -> Tensor:
    """Return zeros of the parameter's shape in that layout; with `turned` column by column."""
    part = local_part(parameter, layout)
    shape = part.shape[::-1] if turned else part.shape
    result = torch.zeros(shape, dtype=dtype, device=part.device)
    result = result.mT if turned else result
    return _assemble(result, parameter, layout) if isinstance(parameter, DTensor) else result


def _assemble(part: Tensor, like: DTensor, layout: TensorPlacements) -> DTensor:
    """Return the tensor of `like`'s shape of which this rank has that part in that layout."""
    return DTensor.from_local(
        part, like.device_mesh, layout, run_check=False, shape=like.shape, stride=like.stride()
    )


def fill_moment(moment: Tensor, saved: Tensor) -> Tensor:
    """Copy a saved moment, whole or sharded in any way, into this one; return it."""
    if not isinstance(moment, DTensor):
        return moment.copy_(saved.full_tensor() if isinstance(saved, DTensor) else saved)
    if not isinstance(saved, DTensor):
        saved = distribute_tensor(saved, moment.device_mesh, moment.placements)
    moment.to_local().copy_(local_part(saved, moment.placements))
    return moment


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
