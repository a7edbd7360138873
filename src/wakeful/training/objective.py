"""The training loss: cross-entropy, with or without a teacher's predictions."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wakeful.config.schema import Config
from wakeful.data.order import number_documents
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.runs.distributed import ALONE, World
from wakeful.training.distillation import Distillation
from wakeful.training.parallel import shard_model

if TYPE_CHECKING:
    from wakeful.loading.model import Model

Loss = Callable[[Tensor, Tensor], Tensor]
"""`loss(tokens, targets)`: the mean over a batch (B, L), in nats."""


def make_loss(
    config: Config,
    decoder: Decoder,
    device: torch.device,
    world: World = ALONE,
    *,
    end_of_text: int,
    tokenizer: Tokenizer | None = None,
    teacher: Decoder | None = None,
) -> Loss:
    """Return the configured loss, compiled with `train.compile`.

    `teacher` is the configured one if it is loaded already; otherwise it is read, and must have the
    tokens of `tokenizer`, the text's. Where attention must not cross documents, `end_of_text`
    separates them. Of several processes each has a share of the teacher's weights, unless
    `train.parallel` is "ddp", and the loss is not compiled: `distribute` compiles each block.
    """
    distill = config.train.distill
    loss: Callable[..., Tensor] = decoder.loss
    if distill.teacher:
        dtype = decoder.head.weight.dtype
        shared = world.size > 1 and config.train.parallel != "ddp"
        # A teacher too large for a device is loaded in main memory before it is sharded.
        load_device = torch.device("cpu") if shared else device

        teacher_model = teacher
        if teacher_model is None:
            from wakeful.loading.load import read_decoder  # noqa: PLC0415 - Transformers takes seconds to import

            model = read_decoder(distill.teacher, dtype=dtype, device=load_device)
            if tokenizer is not None:
                check_same_tokens(tokenizer, model)
            teacher_model = model.decoder()
        if shared:
            teacher_model = shard_model(teacher_model, world, device)
        loss = Distillation(decoder, teacher_model, distill).loss
    if not config.data.cross_documents:
        loss = _within_documents(loss, end_of_text)
    return torch.compile(loss) if config.train.compile and world.size == 1 else loss


def check_same_tokens(tokenizer: Tokenizer, teacher: "Model") -> None:
    """Raise `WakefulError` unless a teacher reads a text's tokens as the text's tokenizer does.

    The teacher may have more added tokens. If it has no tokenizer, its embedding must have as many
    tokens as the text's tokenizer.
    """
    size, remedy = teacher.decoder().config.vocab_size, "distill between models of one tokenizer"
    try:
        teacher_tokenizer = teacher.wakeful_tokenizer.inner
    except WakefulError:
        if size == tokenizer.vocab_size:
            return
        raise WakefulError(
            f"the teacher {teacher.name} has no tokenizer to compare, and an embedding of {size} "
            f"tokens where the text's tokenizer has {tokenizer.vocab_size}: {remedy}"
        ) from None
    teacher_ids = teacher_tokenizer.get_vocab()
    teacher_plain_ids = teacher_tokenizer.get_vocab(with_added_tokens=False)
    plain_ids = tokenizer.inner.get_vocab(with_added_tokens=False)
    added_ids = tokenizer.inner.get_vocab().items() - plain_ids.items()
    if plain_ids != teacher_plain_ids or any(
        teacher_ids.get(token) != token_id for token, token_id in added_ids
    ):
        raise WakefulError(
            f"the teacher {teacher.name} has another tokenizer, of {len(teacher_ids)} tokens, than "
            f"the text, of {tokenizer.vocab_size}: {remedy}"
        )


def _within_documents(loss: Callable[..., Tensor], end_of_text: int) -> Loss:
    """Return the loss with attention masked to documents, which `end_of_text` separates."""

    def masked_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return loss(tokens, targets, documents=number_documents(tokens, end_of_text))

    return masked_loss
