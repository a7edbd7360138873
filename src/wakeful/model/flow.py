"""What one forward pass carries along the layers besides the residual stream."""

from dataclasses import dataclass

from torch import Tensor

from wakeful.model.cache import Cache
from wakeful.model.positions import Rotation
from wakeful.routes.base import Read


@dataclass(frozen=True)
class Flow:
    """The pass's memory of earlier layers, its cache, the tokens' rotation and who sees whom.

    `memory` fills as layers run: each leaves the tensors that later layers read (V_1 above all).
    It is an argument of every block, never a side effect of one, so recomputing a block under
    activation checkpointing, compiling it or sharding it changes nothing.
    """

    memory: dict[Read, Tensor]
    cache: Cache | None
    rotation: Rotation | None
    keep: Tensor | None
    """Boolean (B, L, S): the pairs that see each other, where causality alone does not say."""
