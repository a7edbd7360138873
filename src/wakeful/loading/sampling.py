"""Whole documents that a model writes, many side by side."""

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.loading.model import Model
from wakeful.loading.theirs import TheirForward
from wakeful.model.cache import Cache
from wakeful.model.decoder import Decoder
from wakeful.model.generate import Sampling, side_by_side


def sample(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    ends: Container[int],
    reply: Sequence[int] = (),
    **choice: Any,
) -> list[list[int]]:
    """Return every prompt with what the model writes after it, of up to `length` tokens in all.

    `ends` and `reply` are as for `wakeful.model.generate.side_by_side`, `choice` as for `Sampling`.
    It is computed by our decoder, or by Transformers where ours cannot be the model; each keeps its
    cache.

    Raises:
        WakefulError: a model of Transformers keeps no cache.
    """
    for prompt in prompts:
        model.checked(list(prompt))
    try:
        step = _OurStep(model.decoder(), len(prompts), length)
    except WakefulError:
        step = _TheirStep(model, len(prompts))
    return side_by_side(
        step, prompts, device=model.device, length=length, ends=ends, reply=reply,
        how=Sampling(**choice),
    )  # fmt: skip


class _OurStep:
    def __init__(self, decoder: Decoder, rows: int, length: int) -> None:
        self._decoder, self._rows, self._length = decoder, rows, length
        self._cache: Cache | None = None

    def __call__(self, tokens: Tensor, rows: list[int]) -> Tensor:
        if self._cache is None:
            self._cache = self._decoder.new_cache(self._rows, self._length)
        elif len(rows) < self._cache.batch_size:
            self._cache.reorder(torch.tensor(rows))
        hidden = self._decoder.hidden(tokens, cache=self._cache)[:, -1]
        return self._decoder.logits(hidden)


class _TheirStep:
    """Caches of Transformers are of many kinds: no row is taken out of them, and none is read."""

    def __init__(self, model: Model, rows: int) -> None:
        self._model = model
        self._rows = list(range(rows))
        self._size = rows
        self._forward = TheirForward(model.module)

    def __call__(self, tokens: Tensor, rows: list[int]) -> Tensor:
        self._rows = [self._rows[row] for row in rows]
        whole = tokens.new_zeros((self._size, tokens.shape[1]))
        whole[self._rows] = tokens
        logits = self._forward(whole)
        if self._forward.cache is None:
            raise WakefulError(
                f"{self._model.name}, a {self._model.architecture}, keeps no cache of keys and "
                "values, and generating without one takes too long: choose another model"
            )
        return logits[self._rows]
