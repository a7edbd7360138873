"""What training makes small: the cross-entropy, or that and a teacher's predictions."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from wakeful.config import Config
from wakeful.growth.distill import Distillation
from wakeful.growth.reference import read_teacher
from wakeful.train.parallel import Parallel

Loss = Callable[[Tensor, Tensor], Tensor]
"""`loss(tokens, targets)`: the mean over a batch (B, L), in nats."""


def make_loss(config: Config, parallel: Parallel, device: torch.device) -> Loss:
    """Return the loss that a configuration asks for, chosen once and compiled if asked.

    Of several processes each has the whole teacher.
    """
    decoder = parallel.decoder
    distill = config.train.distill
    loss: Loss = decoder.loss
    if distill.teacher:
        loss = Distillation(
            decoder,
            read_teacher(distill.teacher, dtype=decoder.head.weight.dtype, device=device),
            alpha=distill.alpha,
            temperature=distill.temperature,
            over=distill.over,
        ).loss
    if parallel.world.size > 1:  # whose blocks are compiled one by one
        return functools.partial(parallel.call, loss)
    return torch.compile(loss) if config.train.compile else loss
