"""Distillation's losses a few rows at a time, each with its gradient in closed form.

The numbers are those of `distillation`'s definitions, to rounding. With s a row of the student's
logits, q = softmax(s / T), q' = softmax(s), p the teacher's and y the target:

    d/ds [α CE + (1 − α) T² KL(p ‖ q)] = α (q' − 1_y) + (1 − α) T (q − p)

B batch, L tokens, V vocabulary, k tokens kept of a stored prediction.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wakeful.model.chunked import OfRows, cross_entropy_and_slope, mean_of_rows
from wakeful.model.decoder import IGNORED
from wakeful.training.stored import TopK

Over = Literal["sum", "mean"]
"""How KL gathers the vocabulary: summed, the divergence itself, or averaged, V times less."""
Rest = Literal["bucket", "renormalize"]
"""The part of tokens that a stored prediction leaves out."""


def distillation_in_rows(
    student: Float[Tensor, "B L V"],
    teacher: Float[Tensor, "B L V"],
    targets: Int[Tensor, "B L"],
    *,
    alpha: float,
    temperature: float,
    over: Over,
    rows: int = 0,
) -> Tensor:
    """Return `distillation.distillation_loss`, `rows` rows at a time (0: as many as suit V).

    Gradients reach the student alone, once.
    """
    theirs, wanted = teacher.detach().flatten(0, 1), targets.flatten()
    width = student.shape[-1] if over == "mean" else 1

    def of(some: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        log_q = _divided(logits, temperature).log_softmax(-1)
        log_p = _divided(theirs[some].to(logits.dtype), temperature).log_softmax(-1)
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
    rest: Rest = "bucket",
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
        scaled = _divided(logits, temperature)
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
        slope.scatter_(-1, named, log_q.exp() - p)
        loss *= (1 - alpha) * temperature**2
        slope *= (1 - alpha) * temperature
        return _with_targets(loss, slope, logits, wanted[some], alpha)

    return _mean(student, of, wanted, rows)


def _divided(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits by T, which at 1 would be a pass for nothing."""
    return logits / temperature if temperature != 1 else logits


def _with_targets(
    loss: Tensor, slope: Tensor, logits: Tensor, targets: Tensor, alpha: float
) -> tuple[Tensor, Tensor]:
    """Add α times the cross-entropy to a loss of rows, and its gradient to theirs."""
    if not alpha:
        return loss, slope
    hard, steep = cross_entropy_and_slope(logits, targets)
    return loss.add_(hard, alpha=alpha), slope.add_(steep, alpha=alpha)


def _mean(student: Tensor, of: OfRows, targets: Tensor, rows: int) -> Tensor:
    return mean_of_rows(student.flatten(0, 1), of, targets.ne(IGNORED), rows=rows)
