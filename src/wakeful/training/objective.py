"""What training makes small: the cross-entropy, or that and a teacher's predictions."""

from collections.abc import Callable

import torch
from torch import Tensor

from wakeful.config.schema import Config
from wakeful.data.order import documents_of
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import Decoder
from wakeful.training.distill import Distillation
from wakeful.world import ALONE, World

Loss = Callable[[Tensor, Tensor], Tensor]
"""`loss(tokens, targets)`: the mean over a batch (B, L), in nats."""


def make_loss(
    config: Config,
    decoder: Decoder,
    device: torch.device,
    world: World = ALONE,
    *,
    end_of_text: int,
) -> Loss:
    """Return the loss that a configuration asks for, chosen once and compiled if asked.

    Where attention must not cross from a document into the next, `end_of_text` tells them apart.
    Of several processes each has the whole teacher, and compiles its blocks one by one instead.
    """
    distill = config.train.distill
    loss: Callable[..., Tensor] = decoder.loss
    if distill.teacher:
        loss = Distillation(
            decoder,
            read_decoder(distill.teacher, dtype=decoder.head.weight.dtype, device=device).decoder(),
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
