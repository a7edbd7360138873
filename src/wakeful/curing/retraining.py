"""Learned sinks and gates that replace one stored token: fitted, then trained where `steps` > 0."""

import copy
import math

import torch
from torch import Tensor

from wakeful.curing.matching import MATCHING_PASSES, Matching, match, teacher_divergence
from wakeful.curing.options import CureOptions
from wakeful.errors import Diverged, WakefulError
from wakeful.loading.model import Model
from wakeful.loading.session import count_progress
from wakeful.model.decoder import Decoder
from wakeful.surgery import (
    check_replaceable,
    learned_gates,
    learned_sinks,
    open_gates,
    store_prefix,
)
from wakeful.terminal.display import Display

SPEED = 30.0
"""Learning rate of sinks, gates and attention biases, relative to that of matrices."""
NUM_FIT = 16
"""Sequences that sinks and gates are fitted on."""
_FAST = (".log_sinks", ".key.bias", ".value.bias", ".out.bias")


def check_retrains(plain: Decoder, options: CureOptions) -> None:
    """Raise `WakefulError` where sinks or gates cannot be put into a model."""
    check_replaceable(plain, "sinks" if options.sinks else "gates")
    dtype = plain.embed.weight.dtype
    if options.steps and dtype.itemsize < torch.float32.itemsize:
        raise WakefulError(
            f"the model is in {str(dtype).removeprefix('torch.')}, too coarse to train sinks and "
            "gates: load it with dtype float32"
        )


def fit_sinks_or_gates(
    loaded: Model, token: int, text: Tensor, rest: Tensor, options: CureOptions, show: Display
) -> tuple[Decoder, list[tuple[str, str]]]:  # fmt: skip
    """Return the decoder with sinks or gates, and report lines (label, text) of its training.

    It is trained on `rest` (N,); its divergence is measured on `text` (B, L).
    """
    plain = loaded.decoder()
    teacher = store_prefix(plain, [token])
    show.note("fitting sinks" if options.sinks else "fitting gates")
    start = learned_sinks if options.sinks else learned_gates
    length = min(options.train_length, loaded.context - 1, len(rest))
    count = min(NUM_FIT, len(rest) // length)
    student = start(plain, token, rest[: count * length].view(count, length))
    if options.sinks and options.gates:
        student = open_gates(student)
    student = copy.deepcopy(student)
    before = after = teacher_divergence(student, teacher, text)
    plan = Matching(
        steps=options.steps, batch_size=options.batch_size, length=length, lr=options.lr,
        seed=options.seed,
    )  # fmt: skip
    if options.steps:
        fast = [
            parameter for name, parameter in student.named_parameters()
            if name.endswith(_FAST) or name.startswith("route.")
        ]  # fmt: skip
        tokens = options.batch_size * length
        on_progress = count_progress(
            show, "training steps", loaded, tokens=tokens, passes=MATCHING_PASSES
        )
        match(student, teacher, rest, plan, fast=fast, speed=SPEED, on_progress=on_progress)
        after = teacher_divergence(student, teacher, text)
        if not math.isfinite(after):
            raise Diverged(f"lr = {options.lr:g}: a loss is not finite: lower it")
    return student, _describe_training(options, plan, token, before, after)


def _describe_training(
    options: CureOptions, plan: Matching, token: int, before: float, after: float
) -> list[tuple[str, str]]:
    lines = []
    if options.sinks:
        description = f"softmax-1 with one a head, fitted to id {token} stored before the text"
        lines.append(("Learned sinks", description))
    if options.gates:
        start = "half open" if options.sinks else f"fitted to id {token} stored before the text"
        lines.append(("Gates", f"one a head on the attention's output, {start}"))
    divergence_text = f"KL from the model after id {token}, on text that taught it nothing: "
    if not plan.steps:
        lines.append(("Training", f"none (--steps); {divergence_text}{before:.4f} nats per token"))
    else:
        trained = (
            f"{plan.steps} steps of {plan.batch_size} × {plan.length} tokens, learning rate "
            f"{plan.lr:g}, seed {plan.seed}"
        )
        lines.append(
            ("Training", f"{trained}; {divergence_text}{before:.4f} → {after:.4f} nats per token")
        )
    return lines
