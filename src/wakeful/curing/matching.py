"""`match`: train a student to compute what its teacher does, on any text.

The loss of a batch is

    KL(p ‖ p̂) + 1/N Σ_n mean_i ‖x̂_ni − x_ni‖² / ‖x_ni‖²

with p the teacher's predictions and x_ni its state of token i after layer n, and p̂ and x̂ the
student's: layers far from the head get a loss of their own, so that little text is enough. Every
other batch is of short sequences, whose first tokens count for more.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn

from wakeful.model.decoder import Decoder
from wakeful.model.hooks import hooked
from wakeful.optim.build import warmup_cosine
from wakeful.terminal.display import OnProgress, ignore_progress
from wakeful.training import distillation_in_rows

MATCHING_PASSES = 4
"""Forward passes that a step is worth: the teacher's, and the student's with its backward."""
_LONGEST_GRADIENT = 1.0
_WARMUP = 0.1
_PARTS = 8
"""Factor by which every other batch has shorter and more sequences, so that a sequence's first
tokens, which attention sinks depend on, are trained on that much more often."""


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Steps, batches and learning rate of a student."""

    steps: int
    batch_size: int
    length: int
    """Tokens per sequence."""
    lr: float
    """Largest learning rate: up in a straight line over a tenth of the steps, a cosine down."""
    seed: int = 0
    """Chooses the sequences."""


def match(
    student: Decoder,
    teacher: Decoder,
    text: Int[Tensor, "N"],
    plan: Matching,
    *,
    fast: Sequence[nn.Parameter] = (),
    speed: float = 1.0,
    on_progress: OnProgress = ignore_progress,
) -> list[float]:
    """Train `student` in place to match `teacher` on sequences of `text`; return each step's loss.

    `fast` are parameters that learn at `speed` times the rate. The student is left without
    gradients, and both models in evaluation mode.
    """
    slow = [
        p for p in student.parameters() if all(p is not fast_parameter for fast_parameter in fast)
    ]
    student.train().requires_grad_(True)
    teacher.eval()
    groups = [{"params": slow, "speed": 1.0}, {"params": list(fast), "speed": speed}]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(plan.seed)
    losses: list[float] = []
    on_progress(0, plan.steps)
    try:
        for step in range(plan.steps):
            rate = warmup_cosine(
                step, steps=plan.steps + 1, warmup_steps=round(_WARMUP * plan.steps),
                initial=plan.lr / 10, peak=plan.lr, final=0.0,
            )  # fmt: skip
            for group in optimizer.param_groups:
                group["lr"] = rate * group["speed"]
            parts = _PARTS if step % 2 == 0 else 1
            length = max(2, plan.length // parts)
            starts = torch.randint(
                len(text) - length + 1, (plan.batch_size * parts, 1), generator=generator
            )
            tokens = text[(starts + torch.arange(length)).to(text.device)]
            optimizer.zero_grad()
            loss = _loss(student, teacher, tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), _LONGEST_GRADIENT)
            optimizer.step()
            losses.append(loss.item())
            on_progress(step + 1, plan.steps)
    finally:
        student.eval().requires_grad_(False).zero_grad()
    return losses


def _loss(student: Decoder, teacher: Decoder, tokens: Tensor) -> Tensor:
    with torch.no_grad(), _stream_outputs(teacher) as teacher_states:
        expected = teacher(tokens)
    with _stream_outputs(student) as student_states:
        logits = student(tokens)
    return _divergence(logits, expected) + _distance(student_states, teacher_states)


def _distance(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Return 1/N Σ_n mean_i ‖x̂_ni − x_ni‖² / ‖x_ni‖² of states (B, L, D) after each layer n."""
    distances = [
        ((x - y).square().sum(-1) / y.square().sum(-1)).mean()
        for x, y in zip(student, teacher, strict=True)
    ]
    return torch.stack(distances).mean()


@contextlib.contextmanager
def _stream_outputs(decoder: Decoder) -> Iterator[list[Tensor]]:
    """Collect every block's output while a model runs."""
    outputs: list[Tensor] = []
    blocks = dict(enumerate(decoder.blocks))
    with hooked(blocks, after=lambda _, args, output: outputs.append(output[0])):
        yield outputs


@torch.no_grad()
def teacher_divergence(student: Decoder, teacher: Decoder, text: Int[Tensor, "B L"]) -> float:
    """Return the mean over tokens of KL(p ‖ p̂) in nats, p the teacher's predictions."""
    divergences = [float(_divergence(student(row[None]), teacher(row[None]))) for row in text]
    return float(torch.tensor(divergences, dtype=torch.float64).mean())


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    every = torch.zeros(student.shape[:-1], dtype=torch.long, device=student.device)
    return distillation_in_rows(student, teacher, every, alpha=0.0, temperature=1.0, over="sum")
