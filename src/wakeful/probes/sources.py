"""What every event source shares.

Shapes: B batch, L tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from wakeful.probes.base import Event

Emit = Callable[[Event], None]


class EventSource(ABC):
    """Makes events of a model's forward passes while it is open."""

    reason_for_silence: str = "no layer of it reached its attention"

    @abstractmethod
    def open(self, emit: Emit) -> AbstractContextManager[None]:
        """Attach to the model; detached again when the context ends, whatever happens in it."""


@dataclass(frozen=True)
class Visibility:
    """Who sees whom: causal, within a window, or by explicit pairs."""

    window: int | None = None
    keep: Bool[Tensor, "#B L L"] | None = None


def visibility(
    keep: Bool[Tensor, "#B L L"], valid: Bool[Tensor, "B L"] | None, window: int | None
) -> Visibility:
    """Return the simplest description of a mask that is right for every real query.

    Rows of padding queries are free: nobody looks at them.
    """
    length = keep.shape[-1]
    key = torch.arange(length, device=keep.device)
    query = key.unsqueeze(1)
    causal = (key <= query).unsqueeze(0)
    if valid is not None:
        causal = causal & valid.unsqueeze(1)
        keep = torch.where(valid.unsqueeze(2), keep, causal)
    if bool((keep == causal).all()):
        return Visibility()
    if window is not None:
        near = causal & (key > query - window)
        given = keep if valid is None else torch.where(valid.unsqueeze(2), keep, near)
        if bool((given == near).all()):
            return Visibility(window=window)
    return Visibility(keep=keep)
