"""Who sees whom, read from the mask and the positions that Transformers hands to a model."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from wakeful.errors import WakefulError


@dataclass(frozen=True)
class Visibility:
    """What `Decoder.stream` takes; all None where causality and the tokens' numbers say it all."""

    valid: Bool[Tensor, "B S"] | None
    places: Int[Tensor, "B L"] | None
    documents: Int[Tensor, "B L"] | None

    @classmethod
    def read(
        cls, mask: Tensor | None, positions: Tensor | None, start: int, x: Tensor
    ) -> "Visibility":
        """Read the mask (B, S) and the positions (1 or B, L) of the new tokens x (B, L, D).

        Raises:
            WakefulError: the mask has another shape.
        """
        batch, length = x.shape[:2]
        end = start + length
        if mask is not None and mask.shape != (batch, end):
            raise WakefulError(
                f"attention_mask must mark the real ones of {end} tokens, shape {(batch, end)}, "
                f"and has shape {tuple(mask.shape)}"
            )
        valid = None if mask is None or bool((mask != 0).all()) else mask != 0
        if positions is None:
            return cls(valid, None, None)
        counted = torch.arange(start, end, device=x.device).expand(batch, length)
        positions = positions.expand(batch, length)
        if valid is None and torch.equal(positions, counted):
            return cls(None, None, None)
        if mask is not None or start:
            return cls(valid, positions, None)
        return cls(None, positions, _packed(positions))


def _packed(positions: Int[Tensor, "B L"]) -> Int[Tensor, "B L"] | None:
    """Number the texts of rows that hold several, each of which begins its positions anew."""
    anew = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
    text = anew.long().cumsum(1)
    return text if bool(text.any()) else None
