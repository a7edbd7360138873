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
    """Return how a parameter must lie over the ranks for a step that rotates `axes`: these must be
    whole on every rank. None for a tensor that is not a DTensor.

    A parameter that is sharded along a rotated axis is sharded along the other axis instead. If
    both axes are rotated, it is whole on every rank.

    Raises:
        WakefulError: the parameter is a partial sum over ranks.
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
    """Return this rank's part of a tensor after resharding it to `layout`.

    If the tensor has that layout already, or is not sharded, the part is its own storage, and
    writing to the part changes the tensor.
    """
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=layout).to_local()
    return tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor as it lies, or a tensor that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def write_back(parameter: Tensor, part: Tensor, layout: TensorPlacements) -> None:
    """Write `part`, this rank's part of the parameter in `layout`, into the parameter.

    It does nothing if the parameter has that layout or is not sharded: then the part, as
    `local_part` returns it, is the parameter's own storage.
    """
    if isinstance(parameter, DTensor) and parameter.placements != layout:
        computed = _assemble(part.contiguous(), parameter, layout)
        own_part(parameter).copy_(local_part(computed, parameter.placements))


def zeros(
    parameter: Tensor, layout: TensorPlacements, dtype: torch.dtype, *, transposed: bool
) -> Tensor:
    """Return zeros of the parameter's shape, sharded in `layout` if the parameter is sharded; with
    `transposed` a matrix lies in memory column by column.
    """
    part = local_part(parameter, layout)
    if transposed:
        result = torch.zeros(part.shape[::-1], dtype=dtype, device=part.device).mT
    else:
        result = torch.zeros(part.shape, dtype=dtype, device=part.device)
    return _assemble(result, parameter, layout) if isinstance(parameter, DTensor) else result


def _assemble(part: Tensor, like: DTensor, layout: TensorPlacements) -> DTensor:
    """Return a DTensor in `layout` whose part on this rank is `part`; its shape and its mesh are
    those of `like`.
    """
    return DTensor.from_local(
        part, like.device_mesh, layout, run_check=False, shape=like.shape, stride=like.stride()
    )


def fill_moment(moment: Tensor, saved: Tensor) -> Tensor:
    """Copy a saved moment, whole or sharded in any way, into `moment`; return `moment`."""
    if not isinstance(moment, DTensor):
        return moment.copy_(full_tensor(saved))
    if not isinstance(saved, DTensor):  # each rank has the whole moment
        saved = distribute_tensor(saved, moment.device_mesh, moment.placements)
    moment.to_local().copy_(local_part(saved, moment.placements))
    return moment


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
