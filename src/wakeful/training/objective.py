"""What training makes small: the cross-entropy, or that and a teacher's predictions."""

from collections.abc import Callable

import torch
from torch import Tensor

from wakeful.config.schema import Config
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import Decoder
from wakeful.training.distill import Distillation
from wakeful.world import ALONE, World

Loss = Callable[[Tensor, Tensor], Tensor]
"""`loss(tokens, targets)`: the mean over a batch (B, L), in nats."""


def make_loss(config: Config, decoder: Decoder, device: torch.device, world: World = ALONE) -> Loss:
    """Return the loss that a configuration asks for, chosen once and compiled if asked.

    Of several processes each has the whole teacher, and compiles its blocks one by one instead.
    """
    distill = config.train.distill
    loss: Loss = decoder.loss
    if distill.teacher:
        loss = Distillation(
            decoder,
            read_decoder(distill.teacher, dtype=decoder.head.weight.dtype, device=device).decoder(),
            alpha=distill.alpha,
            temperature=distill.temperature,
            over=distill.over,
        ).loss
    return torch.compile(loss) if config.train.compile and world.size == 1 else loss
