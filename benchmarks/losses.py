"""The losses of training with their gradients, against the same as PyTorch writes them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import Ratio, compare
from wakeful.model.chunked import cross_entropy_of_rows
from wakeful.model.decoder import IGNORED, cross_entropy
from wakeful.training.distillation import distillation_in_rows

BATCH, LENGTH = 4, 256
VOCABULARIES = (4_096, 49_152)


def ratios() -> Iterator[Ratio]:
    """Yield loss and gradient over F.cross_entropy's and F.kl_div's.

    F.kl_div of two log-softmaxes is what TRL and most training scripts compute.
    """
    for vocabulary in VOCABULARIES:
        for dtype in (torch.float32, torch.bfloat16):
            yield from _of(vocabulary, dtype)


def _of(vocabulary: int, dtype: torch.dtype) -> Iterator[Ratio]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, BATCH, LENGTH, vocabulary, generator=generator) * 3
    student, teacher = logits.to(dtype)
    student.requires_grad_()
    targets = torch.randint(vocabulary, (BATCH, LENGTH), generator=generator)
    given: dict[str, Any] = {"alpha": 0.0, "temperature": 1.0}

    def in_rows() -> Tensor:
        wanted = targets.flatten()
        return cross_entropy_of_rows(student.flatten(0, 1), wanted, wanted.ne(IGNORED))

    def kl_div() -> Tensor:
        q, p = (each.float().log_softmax(-1) for each in (student, teacher))
        return F.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean()

    def with_gradient(loss: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(), student)

    what = f"V = {vocabulary:,}, {str(dtype).removeprefix('torch.')}"
    yield compare(
        f"cross-entropy, {what}", with_gradient(in_rows),
        "F.cross_entropy", with_gradient(lambda: cross_entropy(student, targets)), rounds=9,
    )  # fmt: skip
    yield compare(
        f"KL, {what}",
        with_gradient(lambda: distillation_in_rows(student, teacher, targets, **given, over="sum")),
        "F.kl_div", with_gradient(kl_div), rounds=9,
    )  # fmt: skip
