"""Sharded parameters (DTensor, as FSDP2 makes them)."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as it lies; a tensor that is not sharded itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
