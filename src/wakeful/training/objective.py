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
from wakeful.training.parallel import allow_more_versions, shard_model

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
    """Return the configured loss: cross-entropy, or distillation if a teacher is configured.

    `teacher` is that teacher if it is loaded already. Otherwise it is read, and must have the
    tokens of the text's `tokenizer`, if one is given. Several processes share the teacher's
    weights, unless `train.parallel` is "ddp". With `data.cross_documents` off, attention is masked
    to documents, which the token `end_of_text` separates.

    With `train.compile` a single process compiles the loss; of several processes `distribute`
    compiles the decoder's blocks instead.

    Raises:
        WakefulError: the teacher cannot be read, or has other tokens than the text.
    """
    distill = config.train.distill
    loss: Callable[..., Tensor] = decoder.loss
    if distill.teacher:
        dtype = decoder.head.weight.dtype
        is_sharded = world.size > 1 and config.train.parallel != "ddp"
        # A teacher too large for a device is loaded in main memory before it is sharded.
        load_device = torch.device("cpu") if is_sharded else device

        teacher_model = teacher
        if teacher_model is None:
            from wakeful.loading.load import read_decoder  # noqa: PLC0415 - Transformers takes seconds to import

            model = read_decoder(distill.teacher, dtype=dtype, device=load_device)
            if tokenizer is not None:
                check_same_tokens(tokenizer, model)
            teacher_model = model.decoder()
        if is_sharded:
            teacher_model = shard_model(teacher_model, world, device)
        loss = Distillation(decoder, teacher_model, distill).loss
    if not config.data.cross_documents:
        loss = _within_documents(loss, end_of_text)
    if not config.train.compile or world.size > 1:
        return loss
    allow_more_versions(1)
    return torch.compile(loss)


def check_same_tokens(tokenizer: Tokenizer, teacher: "Model") -> None:
    """Raise `WakefulError` unless the teacher's tokenizer has the tokens of the text's `tokenizer`,
    with the same ids.

    The teacher may have more added tokens. If it has no tokenizer, its embedding must have as many
    tokens as the text's tokenizer.
    """
    size, remedy = teacher.decoder().config.vocab_size, "distill between models of one tokenizer"
    try:
        teacher_tokenizer = teacher.wakeful_tokenizer.inner
    except WakefulError:  # it has none
        if size == tokenizer.vocab_size:
            return
        raise WakefulError(
            f"the teacher {teacher.name} has no tokenizer to compare, and an embedding of {size} "
            f"tokens where the text's tokenizer has {tokenizer.vocab_size}: {remedy}"
        ) from None
    # "Plain" tokens are those of the vocabulary proper, without added ones.
    teacher_ids = teacher_tokenizer.get_vocab()
    teacher_plain_ids = teacher_tokenizer.get_vocab(with_added_tokens=False)
    plain_ids = tokenizer.inner.get_vocab(with_added_tokens=False)
    added_ids = dict(tokenizer.inner.get_vocab().items() - plain_ids.items())
    has_added_ids = added_ids.items() <= teacher_ids.items()
    if plain_ids != teacher_plain_ids or not has_added_ids:
        raise WakefulError(
            f"the teacher {teacher.name} has another tokenizer, of {len(teacher_ids)} tokens, than "
            f"the text, of {tokenizer.vocab_size}: {remedy}"
        )


def _within_documents(loss: Callable[..., Tensor], end_of_text: int) -> Loss:
    """Return `loss` with attention masked to documents, which the token `end_of_text` separates."""

    def masked_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return loss(tokens, targets, documents=number_documents(tokens, end_of_text))

    return masked_loss
