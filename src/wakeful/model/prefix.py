"""Tokens that stand before every sequence."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from wakeful.errors import WakefulError


def prefix_ids(tokens: Sequence[int], table: Tensor) -> Int[Tensor, "1 P"]:
    """Return the ids of a prefix's tokens as a batch of one sequence, on the device of the
    embedding `table` (V, D).

    Raises:
        WakefulError: there are no tokens, or one is not in the vocabulary.
    """
    if not tokens:
        raise WakefulError("a prefix needs at least one token")
    wrong = [token for token in tokens if not 0 <= token < len(table)]
    if wrong:
        raise WakefulError(f"token {wrong[0]} is not in the vocabulary of {len(table)}")
    return torch.tensor([list(tokens)], device=table.device)
