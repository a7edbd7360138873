"""Rounding of the weights that a change has made to the type of a model's files."""

import torch
from torch import nn

from wakeful.errors import WakefulError
from wakeful.paged import stored_tensor


@torch.no_grad()
def round_changed(changed: nn.Module, original: nn.Module, dtype: torch.dtype | None) -> bool:
    """Round the weights in which a model differs from the original, in place, to the type that they
    are written in; return whether there were any.

    The model that is measured is then the model that is written. `dtype` is that type, None for
    the weights' own. Unchanged weights are not rounded: a norm that is stored as its weight minus
    one is exact in the file, and not in the decoder.

    Raises:
        WakefulError: a weight is too large for the type.
    """
    if dtype is None or torch.promote_types(dtype, next(changed.parameters()).dtype) == dtype:
        return False  # `dtype` holds all numbers exactly
    originals = dict(original.named_parameters())
    has_changed = False
    for name, parameter in changed.named_parameters():
        old = originals.get(name)
        if stored_tensor(parameter).dtype == dtype or old is parameter:
            continue  # it has the type already, or is shared with the original
        if old is not None and torch.equal(old, parameter):
            continue  # a copy that did not change
        rounded = parameter.to(dtype)
        if not rounded.isfinite().all():
            type_name = str(dtype).removeprefix("torch.")
            raise WakefulError(
                f"{name} is too large for {type_name}, the type of the model's files: "
                "cure it with --stored float32"
            )
        parameter.copy_(rounded)
        has_changed = True
    return has_changed
