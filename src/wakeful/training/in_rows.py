"""Distillation's losses a few rows at a time, each with its gradient in closed form.

Autograd keeps half a dozen tensors as large as the logits for a divergence and walks over each
twice. Here a few rows stay in the processor's cache from the logits to their gradient, which alone
is kept. The numbers are those of `distillation`'s definitions, to rounding. With s a row of the
student's logits, q = softmax(s / T), q' = softmax(s), p the teacher's and y the target:

    d/ds [α CE + (1 − α) T² KL(p ‖ q)] = α (q' − 1_y) + (1 − α) T (q − p)

B batch, L tokens, N = B L rows, V vocabulary, k tokens kept of a stored prediction.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from wakeful.model.decoder import IGNORED
from wakeful.training.stored import TopK

_NUMBERS = {"cpu": 2**20}
"""Logits at a time: 4 MB a tensor on a processor, which its cache holds; elsewhere 512 MB."""
_ELSEWHERE = 2**27

Rows = Callable[[slice, Float[Tensor, "n V"]], tuple[Float[Tensor, "n"], Float[Tensor, "n V"]]]
"""`of(rows, logits)`: the loss of some rows each, and its gradient by their logits."""


def distillation_in_rows(
    student: Float[Tensor, "B L V"],
    teacher: Float[Tensor, "B L V"],
    targets: Int[Tensor, "B L"],
    *,
    alpha: float,
    temperature: float,
    over: Literal["sum", "mean"],
    rows: int = 0,
) -> Tensor:
    """Return `distillation.distillation_loss`, `rows` rows at a time (0: as many as suit V).

    Gradients reach the student alone, once.
    """
    theirs, wanted = teacher.detach().flatten(0, 1), targets.flatten()
    width = student.shape[-1] if over == "mean" else 1

    def of(some: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        log_q = (logits / temperature if temperature != 1 else logits).log_softmax(-1)
        log_p = theirs[some].to(logits.dtype)
        log_p = (log_p / temperature if temperature != 1 else log_p).log_softmax(-1)
        p = log_p.exp()
        loss = log_p.sub_(log_q).mul_(p).sum(-1) * ((1 - alpha) * temperature**2 / width)
        slope = log_q.exp().sub_(p).mul_((1 - alpha) * temperature / width)
        return _with_targets(loss, slope, logits, wanted[some], alpha)

    return _mean(student, of, wanted, rows)


def top_k_in_rows(
    student: Float[Tensor, "B L V"],
    teacher: TopK,
    targets: Int[Tensor, "B L"],
    *,
    alpha: float,
    temperature: float,
    rest: Literal["bucket", "renormalize"] = "bucket",
    rows: int = 0,
) -> Tensor:
    """Return `distillation.top_k_loss`, `rows` rows at a time (0: as many as suit V).

    By a logit in K the gradient of the divergence is T times q − p. By one outside it is q less
    its share of p_R, q p_R / q_R, with a bucket; q alone, renormalized or with nothing outside.
    """
    ids, kept, left = (each.flatten(0, 1) for each in (teacher.ids, teacher.kept, teacher.rest))
    wanted = targets.flatten()
    whole = ids.shape[-1] == student.shape[-1]

    def of(some: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        scaled = logits / temperature if temperature != 1 else logits
        named, log_p = ids[some], kept[some].to(logits.dtype)
        found = scaled.gather(-1, named)
        log_whole, outside = found.logsumexp(-1), None
        if not whole:
            outside = scaled.scatter(-1, named, -torch.inf).logsumexp(-1)
            log_whole = torch.logaddexp(log_whole, outside)
        if rest == "renormalize":
            log_p = log_p.log_softmax(-1)
        p = log_p.exp()
        log_q = found - log_whole.unsqueeze(-1)
        loss = (p * (log_p - log_q)).sum(-1)
        slope = (scaled - log_whole.unsqueeze(-1)).exp_()
        if outside is not None and rest == "bucket":
            log_rest = left[some].to(logits.dtype)
            log_others = outside - log_whole
            loss += log_rest.exp() * (log_rest - log_others)
            slope.mul_((1 - (log_rest - log_others).exp()).unsqueeze(-1))
        elif outside is not None:
            slope.mul_(p.sum(-1, keepdim=True))
        slope.scatter_(-1, named, log_q.exp() - p)
        loss *= (1 - alpha) * temperature**2
        slope *= (1 - alpha) * temperature
        return _with_targets(loss, slope, logits, wanted[some], alpha)

    return _mean(student, of, wanted, rows)


def _with_targets(
    loss: Tensor, slope: Tensor, logits: Tensor, targets: Tensor, alpha: float
) -> tuple[Tensor, Tensor]:
    """Add α times the cross-entropy to a loss of rows, and its gradient to theirs."""
    if not alpha:
        return loss, slope
    at = targets.clamp(min=0).unsqueeze(-1)
    log_q = logits.log_softmax(-1)
    loss = loss - alpha * log_q.gather(-1, at).squeeze(-1)
    slope.add_(log_q.exp_(), alpha=alpha)
    return loss, slope.scatter_add_(-1, at, slope.new_full(at.shape, -alpha))


def _mean(student: Tensor, of: Rows, targets: Tensor, rows: int) -> Tensor:
    if not rows:
        rows = max(1, _NUMBERS.get(student.device.type, _ELSEWHERE) // student.shape[-1])
    found: Any = _Mean.apply(student.flatten(0, 1), of, targets.ne(IGNORED), rows)
    return found


class _Mean(torch.autograd.Function):
    """The mean over the rows counted. Logits are read in float32, or in float64 where they are."""

    @staticmethod
    def forward(ctx, logits: Tensor, of: Rows, counted: Tensor, rows: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        wide = torch.promote_types(logits.dtype, torch.float32)
        share = counted.to(wide)
        share /= share.sum()
        slopes = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        total = logits.new_zeros((), dtype=wide)
        for start in range(0, len(logits), rows):
            some = slice(start, start + rows)
            loss, slope = of(some, logits[some].to(wide))
            total += loss.dot(share[some])
            if slopes is not None:
                slopes[some] = slope.mul_(share[some].unsqueeze(-1))
        if slopes is not None:
            ctx.save_for_backward(slopes)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes,) = ctx.saved_tensors
        return slopes * grad.to(slopes.dtype), None, None, None
