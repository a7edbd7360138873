"""Distillation: a student learns from a teacher's predictions.

Hinton et al. 2015; When Attention Collapses, appendix B. Each loss stands twice: its definition,
and the same a few rows at a time, to rounding, with its gradient in closed form. With s a row of
the student's logits, q = softmax(s / T), q' = softmax(s), p the teacher's and y the target:

    d/ds [α CE + (1 − α) T² KL(p ‖ q)] = α (q' − 1_y) + (1 − α) T (q − p)

B batch, L tokens, V vocabulary.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from wakeful.config.schema import DistillConfig
from wakeful.errors import WakefulError
from wakeful.model.chunked import OfRows, cross_entropy_and_slope, mean_of_rows
from wakeful.model.decoder import IGNORED, Decoder

Over = Literal["sum", "mean"]
"""Reduction of KL over the vocabulary: summed, the divergence itself, or averaged, V times less."""


def distillation_loss(
    student: Float[Tensor, "B L V"],
    teacher: Float[Tensor, "B L V"],
    targets: Int[Tensor, "B L"],
    *,
    alpha: float,
    temperature: float,
    over: Over,
) -> Tensor:
    """Return α CE + (1 − α) T² KL in nats, the mean over the counted targets (−100: not counted).

    CE is the student's cross-entropy; KL = Σ_v p_v (ln p_v − ln q_v) with p and q the softmax of
    the teacher's and the student's logits over T. The paper states α = 0.6 and T = 1; its losses
    suggest that it averaged the KL over the vocabulary (`over="mean"`), which makes it negligible.
    """
    if student.dtype != torch.float64:
        student, teacher = student.float(), teacher.float()
    counted = targets != IGNORED
    hard = F.cross_entropy(student[counted], targets[counted])
    divergence = F.kl_div(
        (student[counted] / temperature).log_softmax(-1),
        (teacher[counted] / temperature).log_softmax(-1).to(student.dtype),
        reduction="none",
        log_target=True,
    )
    soft = divergence.sum(-1) if over == "sum" else divergence.mean(-1)
    return alpha * hard + (1 - alpha) * temperature**2 * soft.mean()


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
    """Return `distillation_loss`, computed for `rows` tokens at a time to save memory; with 0 the
    vocabulary's size decides how many.

    Gradients reach the student alone; there are no second derivatives.
    """
    teacher_logits, flat_targets = teacher.detach().flatten(0, 1), targets.flatten()
    num_averaged = student.shape[-1] if over == "mean" else 1

    def row_losses(part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses of the tokens in `part` and their gradients by the student's logits.

        The gradient of T² KL(p ‖ q) is T (q − p).
        """
        log_q = _divided(logits, temperature).log_softmax(-1)
        log_p = _divided(teacher_logits[part].to(logits.dtype), temperature).log_softmax(-1)
        p = log_p.exp()
        divergence = log_p.sub_(log_q).mul_(p).sum(-1)  # in place: log_p is not needed again
        loss = divergence * ((1 - alpha) * temperature**2 / num_averaged)
        slope = log_q.exp().sub_(p).mul_((1 - alpha) * temperature / num_averaged)
        return _with_targets(loss, slope, logits, flat_targets[part], alpha)

    return _mean(student, row_losses, flat_targets, rows)


def _divided(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits by T; at T = 1 return them without a copy."""
    return logits / temperature if temperature != 1 else logits


def _with_targets(
    loss: Tensor, slope: Tensor, logits: Tensor, targets: Tensor, alpha: float
) -> tuple[Tensor, Tensor]:
    """Add α times the cross-entropy to the losses of rows, and α times its gradient to their
    gradients `slope`, both in place; return (losses, gradients).
    """
    if not alpha:
        return loss, slope
    hard, hard_slope = cross_entropy_and_slope(logits, targets)
    return loss.add_(hard, alpha=alpha), slope.add_(hard_slope, alpha=alpha)


def _mean(student: Tensor, row_losses: OfRows, targets: Tensor, rows: int) -> Tensor:
    return mean_of_rows(student.flatten(0, 1), row_losses, targets.ne(IGNORED), rows=rows)


def check_vocabulary(student_size: int, teacher_size: int) -> None:
    """Raise `WakefulError` if the teacher's vocabulary has fewer tokens than the student's."""
    if student_size > teacher_size:
        raise WakefulError(
            f"the teacher's vocabulary of {teacher_size} tokens is smaller than the student's of "
            f"{student_size}: distill between models of one tokenizer"
        )


class Distillation:
    """The loss of a student with a live teacher.

    Of a teacher with a larger vocabulary, padded or with tokens added later, the logits beyond the
    student's vocabulary are cut off: p is its prediction given that the token is one of the
    student's.
    """

    def __init__(
        self,
        student: Decoder,
        teacher: Decoder,
        config: DistillConfig,
    ) -> None:
        """Freeze the teacher and put it into evaluation mode.

        Raises:
            WakefulError: the teacher lacks tokens of the student's vocabulary.
        """
        check_vocabulary(student.config.vocab_size, teacher.config.vocab_size)
        self.student = student
        self.teacher = teacher.eval().requires_grad_(False)
        self.config = config
        self._vocab_size = student.config.vocab_size

    def loss(
        self,
        tokens: Int[Tensor, "B L"],
        targets: Int[Tensor, "B L"],
        *,
        documents: Int[Tensor, "B L"] | None = None,
    ) -> Tensor:
        """Return the distillation loss of a batch, the mean over its targets in nats; gradients
        reach the student alone.

        `documents` masks the attention of both models; see `Decoder.forward`.
        """
        with torch.no_grad():
            # A teacher's vocabulary may be padded beyond the student's.
            teacher_logits = self.teacher(tokens, documents=documents)[..., : self._vocab_size]
        # Both are the same loss: `distillation_loss`, the formula, is fast once torch.compile has
        # fused it; uncompiled, `distillation_in_rows` is faster.
        loss = distillation_loss if torch.compiler.is_compiling() else distillation_in_rows
        return loss(
            self.student(tokens, documents=documents),
            teacher_logits,
            targets,
            alpha=self.config.alpha,
            temperature=self.config.temperature,
            over=self.config.over,
        )
