"""What training makes small: the cross-entropy, or that and a teacher's predictions.

Distillation: Hinton et al. 2015; When Attention Collapses, appendix B. B batch, L tokens, V
vocabulary.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from wakeful.config.schema import Config
from wakeful.data.order import documents_of
from wakeful.errors import WakefulError
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import IGNORED, Decoder
from wakeful.world import ALONE, World

Over = Literal["sum", "mean"]
"""How KL gathers the vocabulary: summed, the divergence itself, or averaged, V times less."""


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
    suggest that its KL was averaged over the vocabulary (`over="mean"`), which leaves next to
    nothing of it.
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


def check_same_vocabulary(student: int, teacher: int) -> None:
    """Raise `WakefulError` where a student and a teacher have vocabularies of different sizes."""
    if student != teacher:
        raise WakefulError(
            f"the teacher's vocabulary of {teacher} tokens is not the student's of {student}: "
            "distil between models of one tokenizer"
        )


class Distillation:
    """The loss of a student with its teacher at hand."""

    def __init__(
        self, student: Decoder, teacher: Decoder, *, alpha: float, temperature: float, over: Over
    ) -> None:
        """Raises `WakefulError` where the two cannot see the same tokens, or a number is off."""
        check_same_vocabulary(student.config.vocab_size, teacher.config.vocab_size)
        if over not in get_args(Over):
            raise WakefulError(f"over must be one of {', '.join(get_args(Over))}, got {over!r}")
        if not 0 <= alpha <= 1 or not temperature > 0:
            raise WakefulError(
                f"alpha must be between 0 and 1 and temperature positive, got {alpha} and "
                f"{temperature}"
            )
        self.student = student
        self.teacher = teacher.eval().requires_grad_(False)
        self.alpha = alpha
        self.temperature = temperature
        self.over: Over = over

    def loss(
        self,
        tokens: Int[Tensor, "B L"],
        targets: Int[Tensor, "B L"],
        *,
        documents: Int[Tensor, "B L"] | None = None,
    ) -> Tensor:
        """Return the distillation loss of a batch; gradients reach the student alone.

        Both see of each row what `documents` lets them see (`Decoder.forward`).
        """
        with torch.no_grad():
            wanted = self.teacher(tokens, documents=documents)
        return distillation_loss(
            self.student(tokens, documents=documents),
            wanted,
            self.student.counted(targets),
            alpha=self.alpha,
            temperature=self.temperature,
            over=self.over,
        )


Loss = Callable[[Tensor, Tensor], Tensor]
"""`loss(tokens, targets)`: the mean over a batch (B, L), in nats."""


def make_loss(
    config: Config,
    decoder: Decoder,
    device: torch.device,
    world: World = ALONE,
    *,
    end_of_text: int,
    teacher: Decoder | None = None,
) -> Loss:
    """Return the loss that a configuration asks for, chosen once and compiled if asked.

    `teacher` is the one that the configuration names, where it is at hand already.
    Where attention must not cross from a document into the next, `end_of_text` tells them apart.
    Of several processes each has the whole teacher, and compiles its blocks one by one instead.
    """
    distill = config.train.distill
    loss: Callable[..., Tensor] = decoder.loss
    if distill.teacher:
        dtype = decoder.head.weight.dtype
        loss = Distillation(
            decoder,
            teacher or read_decoder(distill.teacher, dtype=dtype, device=device).decoder(),
            alpha=distill.alpha,
            temperature=distill.temperature,
            over=distill.over,
        ).loss
    if not config.data.cross_documents:
        loss = _within_documents(loss, end_of_text)
    return torch.compile(loss) if config.train.compile and world.size == 1 else loss


def _within_documents(loss: Callable[..., Tensor], end_of_text: int) -> Loss:
    def within(tokens: Tensor, targets: Tensor) -> Tensor:
        return loss(tokens, targets, documents=documents_of(tokens, end_of_text))

    return within
