"""Mean losses computed over a few rows of logits at a time, with gradients in closed form.

Autograd keeps several tensors as large as the logits and reads each from memory. Here a few rows
stay in the processor's cache from the logits to their gradient, the only tensor that is kept.
Shapes: N rows, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.tracing import is_differentiated_again

_NUMBERS = {"cpu": 2**20}
"""Logits per step: tensors of 4 MB on a processor, which fit its cache; of 512 MB elsewhere."""
_ELSEWHERE = 2**27

MANY = 2**24
"""Number of logits (64 MB) from which the cross-entropy is computed by rows; no gain below it."""

OfRows = Callable[[slice, Float[Tensor, "n V"]], tuple[Float[Tensor, "n"], Float[Tensor, "n V"]]]
"""`row_losses(rows, logits)`: the losses of some rows, and their gradients with respect to the
logits as a new tensor.
The logits are float32, or float64 if the model's are."""


def mean_of_rows(
    logits: Float[Tensor, "N V"], row_losses: OfRows, counted: Bool[Tensor, "N"], *, rows: int = 0
) -> Tensor:
    """Return the mean loss of the `counted` rows.

    `row_losses` takes a slice of rows and their logits, and returns each row's loss and its
    gradient by the logits. The mean is computed `rows` at a time; 0 lets V and the device decide
    how many. It can be differentiated once: `create_graph=True` is refused. The gradient has the
    logits' dtype.
    """
    if not rows:
        rows = max(1, _NUMBERS.get(logits.device.type, _ELSEWHERE) // logits.shape[-1])
    mean: Any = _Mean.apply(logits, row_losses, counted, rows)
    return mean


def cross_entropy_of_rows(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, "N"],
    counted: Bool[Tensor, "N"],
    *,
    rows: int = 0,
) -> Tensor:
    """Return the mean of −log softmax(logits)_target over the `counted` rows.

    It is computed `rows` at a time, together with its gradient softmax − 1_target; 0 lets V and
    the device decide how many.
    """

    def losses_and_slopes(part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy_and_slope(logits, targets[part])

    return mean_of_rows(logits, losses_and_slopes, counted, rows=rows)


def cross_entropy_and_slope(
    logits: Float[Tensor, "n V"], targets: Int[Tensor, "n"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n V"]]:
    """Return (the cross-entropy of each row, its gradient softmax − 1_target by the logits)."""
    column = targets.clamp(min=0).unsqueeze(-1)  # rows that are not counted have negative targets
    log_q = logits.log_softmax(-1)
    loss = -log_q.gather(-1, column).squeeze(-1)
    softmax = log_q.exp_()
    return loss, softmax.scatter_add_(-1, column, softmax.new_full(column.shape, -1.0))


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, row_losses: OfRows, counted: Tensor, rows: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the mean loss of the `counted` rows, computed `rows` at a time; save its gradient
        by the logits, if backward will need it.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32)
        weights = counted.to(dtype)  # each row's weight in the mean
        weights /= weights.sum()
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        mean = logits.new_zeros((), dtype=dtype)
        for start in range(0, len(logits), rows):
            part = slice(start, start + rows)
            losses, slopes = row_losses(part, logits[part].to(dtype))
            mean += losses.dot(weights[part])
            if gradient is not None:
                gradient[part] = slopes.mul_(weights[part].unsqueeze(-1))
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return mean

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient by the logits, which `forward` saved, times `grad`; the other inputs
        have none.

        Raises:
            WakefulError: the gradient is itself to be differentiated (`create_graph=True`).
        """
        if is_differentiated_again():
            raise WakefulError(
                "a mean loss over many logits is computed with its gradient and has no second "
                'one: take Decoder.loss(reduction="sum") and divide, for create_graph=True'
            )
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None
