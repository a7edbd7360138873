"""Whole documents that a model writes, many side by side."""

from collections.abc import Container, Sequence
from typing import Any

from wakeful.errors import WakefulError
from wakeful.loading.hf_forward import HFForward
from wakeful.loading.model import Model
from wakeful.model.generate import CachedForward, Sampling, continue_prompts


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

    `ends` and `reply`: see `wakeful.model.generate.continue_prompts`; `choice`: see `Sampling`.
    It is computed by our decoder, or by Transformers where ours cannot be the model; each keeps its
    cache.

    Raises:
        WakefulError: a model of Transformers keeps no cache.
    """
    for prompt in prompts:
        model.checked(list(prompt))
    try:
        step = CachedForward(model.decoder(), len(prompts), length)
    except WakefulError:
        step = HFForward(model.module, len(prompts))
    return continue_prompts(
        step, prompts, device=model.device, length=length, ends=ends, reply=reply,
        how=Sampling(**choice),
    )  # fmt: skip
