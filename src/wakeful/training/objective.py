"""The training loss: the cross-entropy, or that and a teacher's predictions."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wakeful.config.schema import Config, DistillConfig
from wakeful.data.order import documents_of
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.runs.distributed import ALONE, World
from wakeful.training.distillation import Distillation
from wakeful.training.parallel import in_shares

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
    """Return the loss that a configuration asks for, chosen once and compiled if asked.

    `teacher` is the one that the configuration names, where it is loaded already; one that is read
    must have the tokens of `tokenizer`, the text's.
    Where attention must not cross from a document into the next, `end_of_text` tells them apart.
    Of several processes each has its shares of the teacher (`train.parallel`), and blocks are
    compiled one by one instead.
    """
    distill = config.train.distill
    loss: Callable[..., Tensor] = decoder.loss
    if distill.teacher:
        dtype = decoder.head.weight.dtype
        shared = world.size > 1 and config.train.parallel != "ddp"
        # What a device may be too small for is whole in the machine's memory alone.
        place = torch.device("cpu") if shared else device

        given = teacher
        if given is None:
            from wakeful.loading.load import read_decoder  # noqa: PLC0415 - Transformers takes seconds to import

            model = read_decoder(distill.teacher, dtype=dtype, device=place)
            if tokenizer is not None:
                check_same_tokens(tokenizer, model)
            given = model.decoder()
        if shared:
            given = in_shares(given, world, device)
        loss = Distillation(decoder, given, distill).loss
    if not config.data.cross_documents:
        loss = _within_documents(loss, end_of_text)
    return torch.compile(loss) if config.train.compile and world.size == 1 else loss


def loss_name(distill: DistillConfig) -> str:
    """Return what a step's loss is, in two words or so: without a teacher it is the text's."""
    if not distill.teacher:
        return "loss"
    parts = ["text"] * bool(distill.alpha) + ["divergence"] * (distill.alpha < 1)
    return f"{' + '.join(parts)} to the teacher" if distill.alpha < 1 else " + ".join(parts)


def check_same_tokens(ours: Tokenizer, teacher: "Model") -> None:
    """Raise `WakefulError` unless a teacher reads a text's tokens as the text's tokenizer does.

    It may have more that were added to the tokenizer. One without a tokenizer must have an
    embedding of as many tokens.
    """
    size, cure = teacher.decoder().config.vocab_size, "distill between models of one tokenizer"
    try:
        theirs = teacher.own_tokenizer.inner
    except WakefulError:
        if size == ours.vocab_size:
            return
        raise WakefulError(
            f"the teacher {teacher.name} has no tokenizer to compare, and an embedding of {size} "
            f"tokens where the text's tokenizer has {ours.vocab_size}: {cure}"
        ) from None
    known, plain = theirs.get_vocab(), theirs.get_vocab(with_added_tokens=False)
    added = ours.inner.get_vocab().items() - ours.inner.get_vocab(with_added_tokens=False).items()
    alike = ours.inner.get_vocab(with_added_tokens=False) == plain
    if not alike or any(known.get(token) != number for token, number in added):
        raise WakefulError(
            f"the teacher {teacher.name} has another tokenizer, of {len(known)} tokens, than the "
            f"text, of {ours.vocab_size}: {cure}"
        )


def _within_documents(loss: Callable[..., Tensor], end_of_text: int) -> Loss:
    def within(tokens: Tensor, targets: Tensor) -> Tensor:
        return loss(tokens, targets, documents=documents_of(tokens, end_of_text))

    return within
